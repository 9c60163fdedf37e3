"""What the cluster's partitions hold, and why a request can never start there.

Asked on the login node before anything is submitted: Slurm accepts a heterogeneous job that is too
large for its partition and lets it pend for ever. Where `sinfo` is absent or does not answer,
nothing is known and nothing is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from slurm_grpo.config.schema import Config, NodesConfig
from slurm_grpo.errors import SlurmUnavailable
from slurm_grpo.slurm.allocation import expand_hosts
from slurm_grpo.slurm.queue import run_slurm
from slurm_grpo.slurm.script import cpus_per_node, flag_name, node_groups

Found: TypeAlias = Iterator[tuple[tuple[str, ...], str]]

_TIMEOUT_S = 5.0
_NODES = re.compile(r"[^|\s]+\|[^|]*\|[^|]*\|\d+\+?\|\d+\+?\|[^|]*\|.*")
"""A line in the format that `read_partitions` asks for: CPUs and MiB are numbers, `64+` at least
64."""
_LIMITS = (
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
_UNIT_S = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_SIZES = frozenset(
    "partition nodes cpus-per-task mem mem-per-cpu gres gpus-per-node constraint time".split()
)
"""Flags that decide what fits: where a site or a group has its own words for them, nothing is
refused."""


def limit_seconds(text: str) -> int | None:
    """Seconds in `30` (minutes), `30:00`, `4:00:00`, `2-0`, `2-12:30` or `2-12:30:00`; None for
    anything else, such as `UNLIMITED`."""
    for form in _LIMITS:
        if match := re.fullmatch(form, text):
            return sum(_UNIT_S[unit] * int(n) for unit, n in match.groupdict().items() if n)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """Some equal nodes."""

    hosts: frozenset[str]
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
    command = ["sinfo", "-h", "-a", "-e", "-o", "%P|%l|%N|%c|%m|%G|%f"]
    try:
        text = run_slurm(command, timeout_s=_TIMEOUT_S)
    except SlurmUnavailable:
        return {}
    found: dict[str, Partition] = {}
    for line in filter(_NODES.fullmatch, text.splitlines()):  # skips a site's notice
        name, limit, hosts, cpus, mem, gres, features = line.split("|", 6)
        partition = found.setdefault(
            name.removesuffix("*"),
            Partition(is_default=name.endswith("*"), limit_s=limit_seconds(limit)),
        )
        kind = NodeKind(
            hosts=frozenset(expand_hosts(hosts)),
            cpus=int(cpus.rstrip("+")),
            mem_mib=int(mem.rstrip("+")),
            gpus=_gpus(gres),
            features=frozenset(features.split(",")),
        )
        partition.kinds.append(kind)
    return found


def impossible_requests(cfg: Config, partitions: Mapping[str, Partition]) -> Found:
    """(keys, text) for each request that the partitions it names can never give."""
    default = next((name for name, p in partitions.items() if p.is_default), "")
    groups, hosts, n_found = node_groups(cfg), list[frozenset[str]](), 0
    for (key, nodes), cpus in zip(groups.items(), cpus_per_node(cfg), strict=True):
        if _SIZES & {*cfg.site.remove_flags, *map(flag_name, (*cfg.site.flags, *nodes.flags))}:
            continue
        names = (nodes.partition or default).split(",")
        chosen = [partitions[name] for name in names if name in partitions]
        if len(chosen) < len(names):
            n_found += 1
            yield (
                (f"{key}.partition",),
                f"{','.join(names) or 'none given, and the cluster has no default'}; expected one "
                f"of {', '.join(sorted(partitions))}. Choose one of them.",
            )
            continue
        fitting = [
            frozenset[str]().union(*(k.hosts for k in p.kinds if _fits(cfg, nodes, cpus, k)))
            for p in chosen
        ]
        hosts.append(frozenset[str]().union(*fitting))
        for problem in _too_much(cfg, key, nodes, cpus, ",".join(names), chosen, fitting):
            n_found += 1
            yield problem
    if len(hosts) == 2 and not n_found:
        yield from _together(cfg, len(hosts[0] | hosts[1]))


def _too_much(
    cfg: Config,
    key: str,
    nodes: NodesConfig,
    cpus: int,
    names: str,
    chosen: Sequence[Partition],
    fitting: Sequence[frozenset[str]],
) -> Found:
    """More time, or more nodes, than each of the chosen partitions has; `fitting` are its nodes
    that are large enough."""
    limits = [limit for p in chosen if (limit := p.limit_s) is not None]
    asked_s = limit_seconds(cfg.cluster.time_limit) or 0
    if len(limits) == len(chosen) and asked_s > max(limits):
        yield (
            ("cluster.time_limit", f"{key}.partition"),
            f"{cfg.cluster.time_limit} is more than the {max(limits) // 60} minutes that partition "
            f"{names} allows. Lower it: the run requeues itself and continues.",
        )
    if nodes.nodes > (n_fitting := max(map(len, fitting))):
        mem = f", {nodes.mem_gib} GiB" if nodes.mem_gib else ""
        inventory = ", ".join(
            f"{len(k.hosts)} x ({k.cpus} CPUs, {k.gpus} GPUs, {k.mem_mib / 1024:.0f} GiB)"
            for p in chosen
            for k in p.kinds
        )
        yield (
            (f"{key}.nodes", f"{key}.partition"),
            f"{nodes.nodes} node(s) with {cpus} CPUs, {nodes.gpus_per_node} GPUs{mem} each, but "
            f"partition {names} has {n_fitting} such node(s): {inventory}. The job would wait for "
            "ever. Ask for less, or for another partition.",
        )


def _fits(cfg: Config, nodes: NodesConfig, cpus: int, kind: NodeKind) -> bool:
    feature = nodes.constraint or ""
    return (
        kind.cpus >= cpus
        and (cfg.site.gpu_flag == "none" or kind.gpus >= nodes.gpus_per_node)
        and (cfg.site.mem_flag == "none" or kind.mem_mib >= (nodes.mem_gib or 0) * 1024)
        # Anything but a single word is Slurm's to judge.
        and (not re.fullmatch(r"[\w.-]+", feature) or feature in kind.features)
    )


def _together(cfg: Config, n_hosts: int) -> Found:
    """Slurm gives the components of a heterogeneous job different nodes, whatever they hold."""
    n_generators, n_trainers = cfg.cluster.generators.nodes, cfg.cluster.trainers.nodes
    if n_generators + n_trainers > n_hosts:
        yield (
            ("cluster.trainers.nodes", "cluster.generators.nodes"),
            f"{n_trainers} and cluster.generators.nodes: {n_generators} are "
            f"{n_generators + n_trainers} nodes, but their partitions have {n_hosts} such node(s) "
            "together, and two components never share one. The job would wait for ever. Ask for "
            "less, for another partition, or use cluster.allocation = split.",
        )


def _gpus(gres: str) -> int:
    """GPUs in `gpu:a100:4(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)
