"""Local steps: output, exit codes, and that nothing survives what it should not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_grpo.config.schema import Config, GeneratorConfig, ModelConfig, SiteConfig, TrainerConfig
from slurm_grpo.run.directory import RunDir
from slurm_grpo.supervisor.environment import assign_gpus, role_environment, visible_gpus
from slurm_grpo.supervisor.steps import LocalLauncher, StepLauncher
from step_conformance import StepConformance, wait_for_line, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]


class TestLocalSteps(StepConformance):
    @pytest.fixture
    def launcher(self) -> StepLauncher:
        return LocalLauncher()


def test_a_step_dies_with_its_killed_starter_even_if_it_ignores_term(tmp_path: Path) -> None:
    role = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    starter = f"""
import os, sys, time
from pathlib import Path
from slurm_grpo.supervisor.steps import StepSpec, start_local
here = Path({str(tmp_path)!r})
start_local(StepSpec(peer="engine-0", argv=(sys.executable, "-c", {role!r}),
                               env=dict(os.environ), log=here / "log", exit_file=here / "exit"))
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", starter], env=env)
    pid = int(wait_for_line(tmp_path / "log"))
    process.kill()
    process.wait()
    wait_until_gone(pid)


def config(n_engines: int = 1, tensor_parallel: int = 1, n_ranks: int = 1) -> Config:
    generator = GeneratorConfig(n_engines=n_engines)
    engine = replace(generator.engine, tensor_parallel=tensor_parallel)
    return Config(
        model=ModelConfig(path="m"),
        generator=replace(generator, engine=engine, threads=3),
        trainer=TrainerConfig(n_ranks=n_ranks, threads=5),
    )


def environment(base: dict[str, str], peer: str, cfg: Config, root: Path) -> dict[str, str]:
    return role_environment(base, cfg, RunDir(root), attempt=2, peer=peer, incarnation=1)


def test_leftovers_of_a_surrounding_job_do_not_reach_a_role(tmp_path: Path) -> None:
    base = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/etc/slurm.conf",
        "PMI_RANK": "3",
        "MASTER_ADDR": "elsewhere",
        "RANK": "9",
        "WANDB_SERVICE": "x",
        "PYTHONPATH": "/mine",
    }
    env = environment(base, "engine-1", config(n_engines=2), tmp_path)
    assert env == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "PYTHONPATH": f"{ROOT}:/mine",
        "SLURM_GRPO_HOST_ADDRESS": "127.0.0.1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "SLURM_GRPO_RUN_DIR": str(tmp_path.resolve()),
        "SLURM_GRPO_ATTEMPT": "2",
        "SLURM_GRPO_PEER": "engine-1",
        "SLURM_GRPO_INCARNATION": "1",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "HDF5_USE_FILE_LOCKING": "FALSE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_site_may_add_to_the_python_path_but_not_take_the_package_off_it(tmp_path: Path) -> None:
    site = SiteConfig(environment=("PYTHONPATH=/scorers", "HF_HUB_OFFLINE=0"))
    env = environment({"PYTHONPATH": "/old"}, "engine-0", replace(config(), site=site), tmp_path)
    assert (env["PYTHONPATH"], env["HF_HUB_OFFLINE"]) == (f"{ROOT}:/scorers", "0")


def test_a_trainer_rank_is_told_its_rank_and_its_threads(tmp_path: Path) -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": ""}, "trainer-1", config(n_ranks=2), tmp_path)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("1", "1", "2")
    assert env["OMP_NUM_THREADS"] == "5"


def test_engines_get_their_own_gpus_and_trainers_share_the_rest() -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7,8,9"})
    cfg = config(n_engines=2, tensor_parallel=2, n_ranks=2)
    peers = ("engine-0", "engine-1", "trainer-0", "trainer-1")
    assert [assign_gpus(gpus, cfg, peer) for peer in peers] == [
        ["4", "5"],
        ["6", "7"],
        ["8", "9"],
        ["8", "9"],
    ]
    assert assign_gpus(["0"], cfg, "engine-1") == ["0"]
