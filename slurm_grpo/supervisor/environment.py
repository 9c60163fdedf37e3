"""The environment a role process starts with: what the package tells it, less what a surrounding
job left behind.

Pure: takes the supervisor's environment, returns a new one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slurm_grpo.config.schema import Config
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.versions import PACKAGE_ROOT
from slurm_grpo.slurm.submit_env import clean_environment

KEEPS_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # before 2.35 it refuses more
}
"""Tells glibc to keep up to 256 MiB of freed memory: getting it anew, page by page, takes as long
as building a shard."""


def role_environment(
    base: Mapping[str, str],
    cfg: Config,
    run: RunDir,
    *,
    attempt: int,
    peer: str,
    incarnation: int,
) -> dict[str, str]:
    """Environment of the process `peer`; `base` is the supervisor's own.

    On Slurm, what depends on the node is added there (`jobs/task_entry.py`).
    """
    env = clean_environment(base)
    role, _, index = peer.rpartition("-")
    threads = cfg.trainer.threads if role == "trainer" else cfg.generator.threads
    site = dict(pair.split("=", 1) for pair in cfg.site.environment)
    python_path = [str(PACKAGE_ROOT), (env | site).get("PYTHONPATH", "")]
    env |= {
        "SLURM_GRPO_RUN_DIR": str(run.root.resolve()),
        "SLURM_GRPO_ATTEMPT": str(attempt),
        "SLURM_GRPO_PEER": peer,
        "SLURM_GRPO_INCARNATION": str(incarnation),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # a killed role must not take its last words along
        "HDF5_USE_FILE_LOCKING": "FALSE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cfg.cluster.kind == "local":
        env["SLURM_GRPO_HOST_ADDRESS"] = "127.0.0.1"  # nothing of the run leaves this machine
    elif cfg.site.interface is not None:
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), cfg.site.interface)
    if cfg.cluster.kind == "local" or cfg.cluster.allocation == "split":
        # Roles share the cores: threads that spin at barriers stop each other for seconds.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        env.setdefault("KMP_BLOCKTIME", "0")
    if role == "engine":
        env = KEEPS_FREED_MEMORY | env
    else:
        env |= {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": str(cfg.trainer.n_ranks)}
    if cfg.cluster.kind == "local" and (gpus := assign_gpus(visible_gpus(base), cfg, peer)):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env | site | {"PYTHONPATH": os.pathsep.join(filter(None, python_path))}


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Ids of this machine's GPUs that the supervisor may use, without loading CUDA."""
    allowed = env.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu]
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sorted((path.name.removeprefix("nvidia") for path in devices), key=int)


def assign_gpus(gpus: list[str], cfg: Config, peer: str) -> list[str]:
    """The GPUs `peer` sees: an engine its own, a trainer rank all of the trainers' (NCCL needs
    that).

    On a machine with fewer GPUs than processes everybody sees all of them.
    """
    width, n_engines = cfg.generator.engine.tensor_parallel, cfg.generator.n_engines
    if len(gpus) < width * n_engines + cfg.trainer.n_ranks:
        return gpus
    role, _, index = peer.rpartition("-")
    if role == "trainer":
        return gpus[width * n_engines :]
    return gpus[width * int(index) : width * (int(index) + 1)]
