"""A scheduler on a bench: a clock of its own, and short words for what peers do."""

from __future__ import annotations

from typing import Any

from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from slurm_grpo.control.scheduler import Scheduler

LEADER = "trainer-0"


def config(
    n_engines: int = 2,
    *,
    groups_per_step: int = 4,
    max_staleness: int = 0,
    order: str = "strict",
    n_ranks: int = 1,
    tensor_parallel: int = 1,
    steps: int = 10,
) -> Config:
    return Config(
        run=RunConfig(steps=steps),
        model=ModelConfig(path="none"),
        algorithm=AlgorithmConfig(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            order="strict" if order == "strict" else "ready",
        ),
        generator=GeneratorConfig(
            n_engines=n_engines, engine=EngineConfig(tensor_parallel=tensor_parallel)
        ),
        trainer=TrainerConfig(n_ranks=n_ranks),
    )


class Bench:
    """A scheduler with a clock and short words for what peers do."""

    def __init__(self, cfg: Config, *, begin: bool = True, ready: bool = True) -> None:
        self.cfg = cfg
        self.scheduler = Scheduler(cfg)
        self.now = 100.0
        self.incarnations = [-1] * cfg.generator.n_engines
        self.n_shards = 0
        self.scheduler.starting(LEADER, 0, self.now)
        self.tell(LEADER, "hello", host="t", pid=1, log="trainer.log")
        if begin:
            self.begin()
        if ready:
            for engine in range(cfg.generator.n_engines):
                self.start(engine)

    def tell(self, peer: str, kind: str, **body: Any) -> None:
        incarnation = self.incarnations[int(peer[7:])] if peer.startswith("engine") else 0
        self.scheduler.handle(peer, incarnation, kind, body, self.now)
        self.scheduler.view(peer)  # as after each turn of the server: work is given when it looks

    def begin(self, version: int = 0, **changes: Any) -> None:
        body: dict[str, Any] = {
            "next_group": version * self.cfg.algorithm.groups_per_step,
            "n_dropped": 0,
            "consumed": [],
            "available": [],
            "spare": 0,
        }
        self.tell(LEADER, "begin", **body | changes)

    def start(self, engine: int) -> None:
        self.incarnations[engine] += 1
        self.scheduler.starting(f"engine-{engine}", self.incarnations[engine], self.now)
        peer = f"engine-{engine}"
        self.tell(peer, "hello", host=f"node{engine}", pid=1, log=f"{peer}.log")
        self.tell(peer, "ready", probe=[])

    def exit(self, engine: int) -> None:
        self.scheduler.exited(f"engine-{engine}", self.now)

    def view(self, engine: int) -> dict[str, Any]:
        return self.scheduler.view(f"engine-{engine}")

    @property
    def leader(self) -> dict[str, Any]:
        return self.scheduler.view(LEADER)

    @property
    def door(self) -> dict[str, Any]:
        door: dict[str, Any] = self.leader["door"]
        return door

    def open(self, version: int) -> None:
        self.tell(LEADER, "open_door", version=version, store="t:1")

    def engine_says(self, engine: int, kind: str, **body: Any) -> None:
        door = self.door
        self.tell(f"engine-{engine}", kind, epoch=door["epoch"], version=door["version"], **body)

    def arrive(self, *engines: int) -> None:
        for engine in engines:
            self.engine_says(engine, "at_door")

    def receive(self, *engines: int) -> None:
        for engine in engines:
            self.engine_says(engine, "received", digest="d")

    def leader_says(self, kind: str, **body: Any) -> None:
        door = self.door
        self.tell(LEADER, kind, epoch=door["epoch"], version=door["version"], **body)

    def sync(self, version: int, *engines: int) -> None:
        """The whole way through the door, with all of `engines`."""
        engines = engines or tuple(range(self.cfg.generator.n_engines))
        self.open(version)
        self.arrive(*engines)
        self.receive(*engines)
        self.leader_says("commit")
        for engine in engines:
            self.tell(f"engine-{engine}", "installed", version=version)

    def announce(self, engine: int, *groups: int, path: str | None = None) -> None:
        self.n_shards += 1
        shard = {
            "path": path or f"shard{self.n_shards}",
            "groups": [{"group_id": g} for g in groups],
        }
        self.tell(f"engine-{engine}", "announce", shard=shard)

    def announced(self) -> list[int]:
        return [g["group_id"] for shard in self.leader["shards"].values() for g in shard["groups"]]
