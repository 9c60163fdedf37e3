"""What the cluster's partitions hold, and why a request can never start there.

Asked on the login node before anything is submitted: Slurm accepts a heterogeneous job that is too
large for its partition and lets it pend for ever. Where `sinfo` is absent or does not answer,
nothing is known and nothing is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from slurm_grpo.config import Config, NodesConfig
from slurm_grpo.errors import SlurmUnavailable
from slurm_grpo.slurm.allocation import expand_hosts
from slurm_grpo.slurm.queue import run_slurm
from slurm_grpo.slurm.script import cpus_per_node, flag_name, node_groups

Found: TypeAlias = Iterator[tuple[tuple[str, ...], str]]

_TIMEOUT_S = 5.0
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
    for line in text.splitlines():
        name, limit, hosts, cpus, mem, gres, features = line.split("|", 6)
        partition = found.setdefault(
            name.removesuffix("*"),
            Partition(is_default=name.endswith("*"), limit_s=limit_seconds(limit)),
        )
        kind = NodeKind(
            hosts=frozenset(expand_hosts(hosts)),
            cpus=int(cpus.rstrip("+")),  # `64+`: at least
            mem_mib=int(mem.rstrip("+")),
            gpus=_gpus(gres),
            features=frozenset(features.split(",")),
        )
        partition.kinds.append(kind)
    return found


def impossible_requests(cfg: Config, partitions: Mapping[str, Partition]) -> Found:
    """(keys, text) for each request that the partitions it names can never give."""
    asked = zip(node_groups(cfg).items(), cpus_per_node(cfg), strict=True)
    requests = [
        _Request(cfg, key, nodes, cpus, partitions)
        for (key, nodes), cpus in asked
        if not _SIZES & {*cfg.site.remove_flags, *map(flag_name, (*cfg.site.flags, *nodes.flags))}
    ]
    found = [problem for request in requests for problem in request.problems()]
    yield from found
    if len(requests) == 2 and not found:
        yield from _together(*requests)


class _Request:
    """What one group of nodes asks of its partitions."""

    def __init__(
        self,
        cfg: Config,
        key: str,
        nodes: NodesConfig,
        cpus: int,
        partitions: Mapping[str, Partition],
    ) -> None:
        default = next((name for name, p in partitions.items() if p.is_default), "")
        self._cfg, self._key, self.nodes, self._cpus = cfg, key, nodes, cpus
        self._known = sorted(partitions)
        self._names = (nodes.partition or default).split(",")
        self._chosen = [partitions[name] for name in self._names if name in partitions]
        self._fitting = [
            frozenset[str]().union(*(kind.hosts for kind in p.kinds if self._fits(kind)))
            for p in self._chosen
        ]

    @property
    def hosts(self) -> frozenset[str]:
        """Those that could be its nodes."""
        return frozenset[str]().union(*self._fitting)

    def problems(self) -> Found:
        key, nodes, names = self._key, self.nodes, ",".join(self._names)
        if len(self._chosen) < len(self._names):
            given = names or "none given, and the cluster has no default"
            yield (
                (f"{key}.partition",),
                f"{given}; expected one of {', '.join(self._known)}. Choose one of them.",
            )
            return
        limits = [limit for p in self._chosen if (limit := p.limit_s) is not None]
        asked_s = limit_seconds(self._cfg.cluster.time_limit) or 0
        if len(limits) == len(self._chosen) and asked_s > max(limits):
            yield (
                ("cluster.time_limit", f"{key}.partition"),
                f"{self._cfg.cluster.time_limit} is more than the "
                f"{max(limits) // 60} minutes that partition {names} allows. Lower it: the run "
                "requeues itself and continues.",
            )
        if nodes.nodes > (n_fitting := max(map(len, self._fitting))):
            mem = f", {nodes.mem_gib} GiB" if nodes.mem_gib else ""
            inventory = ", ".join(
                f"{len(k.hosts)} x ({k.cpus} CPUs, {k.gpus} GPUs, {k.mem_mib / 1024:.0f} GiB)"
                for p in self._chosen
                for k in p.kinds
            )
            yield (
                (f"{key}.nodes", f"{key}.partition"),
                f"{nodes.nodes} node(s) with {self._cpus} CPUs, {nodes.gpus_per_node} "
                f"GPUs{mem} each, but partition {names} has {n_fitting} such node(s): {inventory}. "
                "The job would wait for ever. Ask for less, or for another partition.",
            )

    def _fits(self, kind: NodeKind) -> bool:
        nodes, site = self.nodes, self._cfg.site
        feature = nodes.constraint or ""
        return (
            kind.cpus >= self._cpus
            and (site.gpu_flag == "none" or kind.gpus >= nodes.gpus_per_node)
            and (site.mem_flag == "none" or kind.mem_mib >= (nodes.mem_gib or 0) * 1024)
            # Anything but a single word is Slurm's to judge.
            and (not re.fullmatch(r"[\w.-]+", feature) or feature in kind.features)
        )


def _together(first: _Request, second: _Request) -> Found:
    """Slurm gives the components of a heterogeneous job different nodes, whatever they hold."""
    n_asked, n_hosts = first.nodes.nodes + second.nodes.nodes, len(first.hosts | second.hosts)
    if n_asked > n_hosts:
        yield (
            ("cluster.trainers.nodes", "cluster.generators.nodes"),
            f"{second.nodes.nodes} and cluster.generators.nodes: "
            f"{first.nodes.nodes} are {n_asked} nodes, but their partitions have {n_hosts} such "
            "node(s) together, and two components never share one. The job would wait for ever. "
            "Ask for less, for another partition, or use cluster.allocation = split.",
        )


def _gpus(gres: str) -> int:
    """GPUs in `gpu:a100:4(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)
