"""What must hold for the sections `cluster` and `site`: what Slurm would refuse, or let wait for
ever.

Called by `checks/config.py`. Yields the keys involved, the one to change first, and what is wrong
with it. Whether directories are shared between nodes cannot be seen from here; `slurm-grpo
doctor` looks.
"""

from __future__ import annotations

import re
import shutil

from slurm_grpo.config.schema import Config, NodesConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.slurm.partitions import Found, impossible_requests, limit_seconds, read_partitions
from slurm_grpo.slurm.script import node_groups, threads_by_node

MIN_TRAINING_S = 60
"""Between a job's start and its signal; Slurm looks every 30 s only."""
_FLAG = re.compile(r"--[a-z][a-z0-9-]*(=[^\n]*)?")


def check_cluster(cfg: Config) -> Found:
    """Every broken rule of a run's cluster and site."""
    yield from _python(cfg)
    if cfg.cluster.kind == "slurm":
        for rules in (_unused, _site, _container, _paths, _limits, _sizes):
            yield from rules(cfg)


def _python(cfg: Config) -> Found:
    python = cfg.cluster.python
    if python is None or (cfg.cluster.kind == "slurm" and cfg.site.container != "none"):
        return
    if shutil.which(python) is None:
        yield (
            ("cluster.python",),
            f"{python} is no program; expected the interpreter of an environment with torch and "
            "vLLM. Leave it out to use the launching one.",
        )


def _limits(cfg: Config) -> Found:
    cluster = cfg.cluster
    limit_s = limit_seconds(cluster.time_limit)
    if not limit_s:
        yield (
            ("cluster.time_limit",),
            f"{cluster.time_limit!r} given; expected minutes, H:M:S or D-H:M:S, such as 90, "
            "4:00:00 or 2-12:00:00.",
        )
    elif not 0 < cluster.signal_s <= limit_s - MIN_TRAINING_S:
        yield (
            ("cluster.signal_s", "cluster.time_limit"),
            f"{cluster.signal_s} seconds before the end of {cluster.time_limit} "
            f"({limit_s} s) leave less than {MIN_TRAINING_S} s to train; expected 1 to "
            f"{max(1, limit_s - MIN_TRAINING_S)}. Raise the time limit, or choose the time that a "
            "step and a checkpoint take.",
        )


def _flags(key: str, flags: tuple[str, ...], example: str = "--reservation=course") -> Found:
    for flag in flags:
        if not _FLAG.fullmatch(flag):
            yield (
                (key,),
                f"{flag!r} given; expected a long flag with its value after `=`, such as "
                f"{example}.",
            )


def _unused(cfg: Config) -> Found:
    """Node groups that this allocation does not read."""
    names = ("generators", "trainers") if cfg.cluster.allocation == "split" else ("shared",)
    reads = " and ".join(node_groups(cfg))
    for name in names:
        if getattr(cfg.cluster, name) != NodesConfig():
            yield (
                (f"cluster.{name}", "cluster.allocation"),
                f"has no effect with cluster.allocation = {cfg.cluster.allocation}, which reads "
                f"{reads}. Move it there, or change the allocation.",
            )


def _sizes(cfg: Config) -> Found:
    """Processes against GPUs and CPUs, and these against what the partitions have."""
    groups = node_groups(cfg).values()
    counts = [n for nodes in groups for n in (nodes.nodes, nodes.gpus_per_node + 1)]
    if min(*counts, cfg.generator.engine.tensor_parallel) < 1:
        return  # said already
    try:
        threads = threads_by_node(cfg)
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        yield (key,), text
        return
    for (key, nodes), on_nodes in zip(node_groups(cfg).items(), threads, strict=True):
        if n_idle := on_nodes.count(0):
            yield (
                (f"{key}.nodes",),
                f"{nodes.nodes}, of which {n_idle} would have no process. Lower it to "
                f"{nodes.nodes - n_idle}, or raise generator.n_engines or trainer.n_ranks.",
            )
        if nodes.cpus_per_node is not None and nodes.cpus_per_node < max(on_nodes):
            yield (
                (f"{key}.cpus_per_node",),
                f"{nodes.cpus_per_node}, but the processes on one node have {max(on_nodes)} "
                "threads (generator.threads, trainer.threads). Raise it, lower those, or leave "
                "it out.",
            )
    if partitions := read_partitions():
        yield from impossible_requests(cfg, partitions)


def _site(cfg: Config) -> Found:
    for key, nodes in node_groups(cfg).items():
        yield from _flags(f"{key}.flags", nodes.flags)
    yield from _flags("site.flags", cfg.site.flags)
    yield from _flags("site.srun_flags", cfg.site.srun_flags, "--network=sn_all")
    for name in cfg.site.remove_flags:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield (
                ("site.remove_flags",),
                f"{name!r} given; expected a flag's name without dashes, such as mem.",
            )
    for setting in cfg.site.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\n]*", setting):
            yield ("site.environment",), f"{setting!r} given; expected NAME=VALUE."


def _container(cfg: Config) -> Found:
    site = cfg.site
    needs = {"pyxis": "container_image", "prefix": "container_prefix"}
    for kind, name in needs.items():
        if site.container == kind and not getattr(site, name):
            yield (
                (f"site.{name}", "site.container"),
                f"missing; site.container = {kind} needs it. Set it, or set container to none.",
            )
        elif site.container != kind and getattr(site, name):
            yield (
                (f"site.{name}", "site.container"),
                f"has no effect with site.container = {site.container}. Set that to {kind}, or "
                "leave it out.",
            )
    if site.container != "none" and cfg.cluster.python is None:
        yield (
            ("cluster.python", "site.container"),
            f"missing; with site.container = {site.container} the roles need the interpreter "
            "inside the container. Set it, for example to python3.",
        )


def _paths(cfg: Config) -> Found:
    if "%" in cfg.run.runs_dir:
        yield (
            ("run.runs_dir",),
            f"{cfg.run.runs_dir} has a %, which Slurm replaces in file names. Choose another "
            "directory.",
        )
