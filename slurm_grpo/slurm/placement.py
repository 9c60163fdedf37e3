"""Which process runs on which node, with which of its GPUs: pure arithmetic over host lists.

Steps ask it where to start a process, and submission asks it with placeholder hosts whether the
request fits. Ranks and hosts are decided here and never read off a node list that Slurm merged or
sorted. Knows nothing of how a step is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slurm_grpo.config.schema import Config, NodesConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.peers import engine_name, trainer_name

Hosts: TypeAlias = Sequence[str]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one process runs."""

    component: int
    """Heterogeneous component; 0 in a split allocation."""
    host: str
    """Slurm's name of the node."""
    gpus: tuple[int, ...]
    """Positions among the job's GPUs of that node. A trainer rank sees those of all ranks there,
    since NCCL needs them, and uses the one at `local_rank`."""
    local_rank: int
    """Counts the ranks of this node from 0; 0 for an engine."""


def place(cfg: Config, components: Sequence[Hosts]) -> dict[str, Seat]:
    """Seats of all processes by peer name.

    `components` are the hosts of generators and trainers (het), or the one list to share (split).
    Raises ConfigError with the arithmetic if they do not fit.
    """
    cluster, n_ranks = cfg.cluster, cfg.trainer.n_ranks
    if cluster.allocation == "het":
        groups, hosts = (cluster.generators, cluster.trainers), tuple(components)
    else:
        groups, (shared,) = (cluster.shared, cluster.shared), components
        half = 0 if cluster.shared.gpus_per_node else len(shared) // 2
        hosts = (shared[:half] or shared, shared[half:])
    engines = _engine_slots(cfg, groups[0], hosts[0])
    free = [(host, gpu) for host in hosts[1] for gpu in range(groups[1].gpus_per_node)]
    if cluster.allocation == "split" and engines and free:
        free = free[free.index((engines[-1][0], engines[-1][1][-1])) + 1 :]
    _check_room(cfg, hosts, len(engines), len(free))
    seats = {engine_name(k): Seat(0, host, gpus, 0) for k, (host, gpus) in enumerate(engines)}
    chosen = free[:n_ranks]
    if not groups[1].gpus_per_node:  # neighbours on one node, as many on each as can be
        chosen = [(hosts[1][rank * len(hosts[1]) // n_ranks], -1) for rank in range(n_ranks)]
    on_host: Counter[str] = Counter()
    for rank, (host, _) in enumerate(chosen):
        gpus = tuple(g for h, g in chosen if h == host and g >= 0)
        seats[trainer_name(rank)] = Seat(len(components) - 1, host, gpus, on_host[host])
        on_host[host] += 1
    return seats


def _engine_slots(
    cfg: Config, nodes: NodesConfig, hosts: Hosts
) -> list[tuple[str, tuple[int, ...]]]:
    """Host and GPUs of each engine, of as many as there is room for; none straddles two nodes."""
    width, n_engines = cfg.generator.engine.tensor_parallel, cfg.generator.n_engines
    if not nodes.gpus_per_node:
        return [(hosts[k % len(hosts)], ()) for k in range(n_engines)]
    slots = [
        (host, tuple(range(first, first + width)))
        for host in hosts
        for first in range(0, nodes.gpus_per_node - width + 1, width)
    ]
    return slots[:n_engines]


def _check_room(cfg: Config, hosts: Sequence[Hosts], n_seated: int, n_free: int) -> None:
    """Raise ConfigError unless `n_seated` engines are all and `n_free` GPUs are enough for the
    ranks."""
    cluster, width = cfg.cluster, cfg.generator.engine.tensor_parallel
    n_engines, n_ranks = cfg.generator.n_engines, cfg.trainer.n_ranks
    lacks_engines = n_seated < n_engines
    if cluster.allocation == "split":
        if lacks_engines or (cluster.shared.gpus_per_node and n_ranks > n_free):
            raise ConfigError(
                f"cluster.shared: {n_engines} engines x tensor_parallel {width} + {n_ranks} "
                f"trainer ranks = {n_engines * width + n_ranks} GPUs, but there are "
                f"{_arithmetic(cluster.shared, hosts[0])}, and no engine may straddle two nodes. "
                "Lower generator.n_engines or trainer.n_ranks, or add nodes."
            )
    elif lacks_engines:
        raise ConfigError(
            f"generator.n_engines: {n_engines} engines x tensor_parallel {width} = "
            f"{n_engines * width} GPUs, but cluster.generators has "
            f"{_arithmetic(cluster.generators, hosts[0])}, which hold {n_seated} whole engine(s). "
            f"{_lower('generator.n_engines', n_seated)}"
        )
    elif cluster.trainers.gpus_per_node and n_ranks > n_free:
        raise ConfigError(
            f"trainer.n_ranks: {n_ranks} ranks need a GPU each, but cluster.trainers has "
            f"{_arithmetic(cluster.trainers, hosts[1])}. {_lower('trainer.n_ranks', n_free)}"
        )


def _arithmetic(nodes: NodesConfig, hosts: Hosts) -> str:
    total = len(hosts) * nodes.gpus_per_node
    return f"{len(hosts)} node(s) x gpus_per_node {nodes.gpus_per_node} = {total}"


def _lower(key: str, room: int) -> str:
    return f"Lower {key} to {room}, or add nodes." if room else "Add GPUs to each node."
