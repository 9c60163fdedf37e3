"""Which process runs on which node, with which of its GPUs: pure arithmetic over host lists.

Steps ask it where to start a process, and submission asks it with placeholder hosts whether the
request fits. Ranks and hosts are decided here and never read off a node list that Slurm merged or
sorted. Knows nothing of how a step is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slurm_grpo.config import Config, NodesConfig
from slurm_grpo.control.messages import engine_name, trainer_name
from slurm_grpo.errors import ConfigError

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
    if cfg.cluster.allocation == "het":
        generators, trainers = components
        return _place_engines(cfg, 0, generators) | _place_trainers(cfg, 1, trainers)
    (hosts,) = components
    if cfg.cluster.shared.gpus_per_node:
        return _share_gpus(cfg, hosts)
    if len(hosts) == 1:
        return _spread_engines(cfg, 0, hosts) | _spread_trainers(cfg, 0, hosts)
    half = len(hosts) // 2
    return _spread_engines(cfg, 0, hosts[:half]) | _spread_trainers(cfg, 0, hosts[half:])


def _place_engines(cfg: Config, component: int, hosts: Hosts) -> dict[str, Seat]:
    per_node = cfg.cluster.generators.gpus_per_node
    if not per_node:
        return _spread_engines(cfg, component, hosts)
    width, n_engines = cfg.generator.engine.tensor_parallel, cfg.generator.n_engines
    room = len(hosts) * (per_node // width)
    if n_engines > room:
        raise ConfigError(
            f"generator.n_engines: {n_engines} engines x tensor_parallel {width} = "
            f"{n_engines * width} GPUs, but cluster.generators has "
            f"{_arithmetic(cfg.cluster.generators, hosts)}, which hold {room} whole engine(s). "
            f"{_lower('generator.n_engines', room)}"
        )
    slots = _engine_slots(hosts, per_node, width)
    return {
        engine_name(k): Seat(component, host, gpus, 0)
        for k, (host, gpus) in zip(range(n_engines), slots, strict=False)
    }


def _place_trainers(cfg: Config, component: int, hosts: Hosts) -> dict[str, Seat]:
    per_node, n_ranks = cfg.cluster.trainers.gpus_per_node, cfg.trainer.n_ranks
    if not per_node:
        return _spread_trainers(cfg, component, hosts)
    if n_ranks > len(hosts) * per_node:
        raise ConfigError(
            f"trainer.n_ranks: {n_ranks} ranks need a GPU each, but cluster.trainers has "
            f"{_arithmetic(cfg.cluster.trainers, hosts)}. "
            f"{_lower('trainer.n_ranks', len(hosts) * per_node)}"
        )
    slots = [(host, gpu) for host in hosts for gpu in range(per_node)]
    return _seat_ranks(component, slots[:n_ranks])


def _share_gpus(cfg: Config, hosts: Hosts) -> dict[str, Seat]:
    """Engines from the first node on, trainer ranks on the GPUs that follow."""
    per_node = cfg.cluster.shared.gpus_per_node
    width, n_engines = cfg.generator.engine.tensor_parallel, cfg.generator.n_engines
    n_ranks = cfg.trainer.n_ranks
    all_slots = [(host, gpu) for host in hosts for gpu in range(per_node)]
    taken = list(zip(range(n_engines), _engine_slots(hosts, per_node, width), strict=False))
    last = (taken[-1][1][0], taken[-1][1][1][-1]) if taken else None
    rest = all_slots[all_slots.index(last) + 1 :] if last else all_slots
    if len(taken) < n_engines or n_ranks > len(rest):
        raise ConfigError(
            f"cluster.shared: {n_engines} engines x tensor_parallel {width} + {n_ranks} trainer "
            f"ranks = {n_engines * width + n_ranks} GPUs, but there are "
            f"{_arithmetic(cfg.cluster.shared, hosts)}, and no engine may straddle two nodes. "
            "Lower generator.n_engines or trainer.n_ranks, or add nodes."
        )
    engines = {engine_name(k): Seat(0, host, gpus, 0) for k, (host, gpus) in taken}
    return engines | _seat_ranks(0, rest[:n_ranks])


def _engine_slots(hosts: Hosts, per_node: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for host in hosts:
        for first in range(0, per_node - width + 1, width):
            yield host, tuple(range(first, first + width))


def _seat_ranks(component: int, slots: Sequence[tuple[str, int]]) -> dict[str, Seat]:
    seats = {}
    for rank, (host, gpu) in enumerate(slots):
        gpus = tuple(g for h, g in slots if h == host)
        seats[trainer_name(rank)] = Seat(component, host, gpus, gpus.index(gpu))
    return seats


def _spread_engines(cfg: Config, component: int, hosts: Hosts) -> dict[str, Seat]:
    return {
        engine_name(k): Seat(component, hosts[k % len(hosts)], (), 0)
        for k in range(cfg.generator.n_engines)
    }


def _spread_trainers(cfg: Config, component: int, hosts: Hosts) -> dict[str, Seat]:
    """Neighbouring ranks on one node, as many on each as can be."""
    n_ranks = cfg.trainer.n_ranks
    chosen = [hosts[rank * len(hosts) // n_ranks] for rank in range(n_ranks)]
    return {
        trainer_name(rank): Seat(component, host, (), rank - chosen.index(host))
        for rank, host in enumerate(chosen)
    }


def _arithmetic(nodes: NodesConfig, hosts: Hosts) -> str:
    total = len(hosts) * nodes.gpus_per_node
    return f"{len(hosts)} node(s) x gpus_per_node {nodes.gpus_per_node} = {total}"


def _lower(key: str, room: int) -> str:
    return f"Lower {key} to {room}, or add nodes." if room else "Add GPUs to each node."
