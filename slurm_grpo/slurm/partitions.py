"""What the cluster's partitions hold, and why a request can never start there.

Asked on the login node before anything is submitted: Slurm accepts a heterogeneous job that is too
large for its partition and lets it pend for ever. Where `sinfo` is absent or does not answer,
nothing is known and nothing is refused.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_grpo.config import Config, NodesConfig
from slurm_grpo.slurm.durations import limit_seconds
from slurm_grpo.slurm.script import cpus_per_node, node_groups
from slurm_grpo.slurm.submit_env import clean_environment

_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """Some equal nodes."""

    n_nodes: int
    cpus: int
    mem_mib: int
    gpus: int
    features: frozenset[str]


@dataclass(kw_only=True, slots=True)
class Partition:
    """One line of `sinfo` for each kind of node in it."""

    is_default: bool
    limit_s: int | None
    """None: unlimited."""
    kinds: list[NodeKind] = field(default_factory=list)


@functools.cache
def read_partitions() -> dict[str, Partition]:
    """Partitions by name; empty where Slurm is not there or does not answer."""
    command = ["sinfo", "-h", "-a", "-e", "-o", "%P|%l|%D|%c|%m|%G|%f"]
    try:
        done = subprocess.run(
            command,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, Partition] = {}
    for line in done.stdout.splitlines():
        name, limit, n_nodes, cpus, mem, gres, features = line.split("|")
        partition = found.setdefault(
            name.removesuffix("*"),
            Partition(is_default=name.endswith("*"), limit_s=limit_seconds(limit)),
        )
        kind = NodeKind(
            n_nodes=int(n_nodes),
            cpus=int(cpus),
            mem_mib=int(mem),
            gpus=_gpus(gres),
            features=frozenset(features.split(",")),
        )
        partition.kinds.append(kind)
    return found


def impossible_requests(
    cfg: Config, partitions: dict[str, Partition]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, text) for each group of nodes that no partition it names can ever give."""
    limit_s = limit_seconds(cfg.cluster.time_limit) or 0
    default = next((name for name, p in partitions.items() if p.is_default), "")
    for (key, nodes), cpus in zip(node_groups(cfg).items(), cpus_per_node(cfg), strict=True):
        names = (nodes.partition or default).split(",")
        if unknown := [name for name in names if name not in partitions]:
            yield (
                (f"{key}.partition",),
                f"{key}.partition: {unknown[0] or 'none given, and the cluster has no default'}; "
                f"expected one of {', '.join(sorted(partitions))}. Choose one of them.",
            )
            continue
        chosen = [partitions[name] for name in names]
        limits = [p.limit_s for p in chosen]
        if limit_s > (longest := max((s for s in limits if s is not None), default=0)) and (
            None not in limits
        ):
            yield (
                ("cluster.time_limit", f"{key}.partition"),
                f"cluster.time_limit: {cfg.cluster.time_limit} is more than the {longest // 60} "
                f"minutes that partition {nodes.partition or default} allows. Lower it: the run "
                "requeues itself and continues.",
            )
        fitting = [sum(k.n_nodes for k in p.kinds if _fits(cfg, k, nodes, cpus)) for p in chosen]
        if max(fitting) < nodes.nodes:
            mem = f", {nodes.mem_gib} GiB" if nodes.mem_gib else ""
            yield (
                (f"{key}.nodes", f"{key}.partition"),
                f"{key}.nodes: {nodes.nodes} node(s) with {cpus} CPUs, {nodes.gpus_per_node} "
                f"GPUs{mem} each, but partition {nodes.partition or default} has {max(fitting)} "
                f"such node(s): {_inventory(chosen)}. The job would wait for ever. Ask for less, "
                "or for another partition.",
            )


def _fits(cfg: Config, kind: NodeKind, nodes: NodesConfig, cpus: int) -> bool:
    constraint = nodes.constraint or ""
    has_feature = not re.fullmatch(r"[\w.-]+", constraint) or constraint in kind.features
    has_gpus = cfg.site.gpu_flag == "none" or kind.gpus >= nodes.gpus_per_node
    has_mem = cfg.site.mem_flag == "none" or kind.mem_mib >= (nodes.mem_gib or 0) * 1024
    return has_feature and has_gpus and has_mem and kind.cpus >= cpus


def _gpus(gres: str) -> int:
    """GPUs in `gpu:a100:4(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)


def _inventory(partitions: list[Partition]) -> str:
    return ", ".join(
        f"{k.n_nodes} x ({k.cpus} CPUs, {k.gpus} GPUs, {k.mem_mib / 1024:.0f} GiB)"
        for p in partitions
        for k in p.kinds
    )
