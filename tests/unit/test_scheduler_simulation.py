"""Whole runs of the scheduler under simulated time: random delays, lost views, deaths and damage.

Engines and the trainer are small state machines that behave as the roles do; the network delivers
messages of one peer in order, and may lose views. Every history must end with every group trained
on exactly once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
)
from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.control.views import HeldView, SentView

View = dict[str, Any]
Wait = Callable[[View], Any]

GROUPS_PER_STEP = 5
STEPS = 6
N_EVAL = 70
HEARTBEAT_S = 1.0


class Engine:
    """One incarnation of an engine. `alive` turns False at its death; its pending events then do
    nothing.
    """

    def __init__(self, sim: Simulation, engine_id: int, incarnation: int) -> None:
        self.sim, self.engine_id, self.incarnation = sim, engine_id, incarnation
        self.name = f"engine-{engine_id}"
        self.alive = True
        self.version: int | None = None
        self.at_door: tuple[int, int] | None = None
        self.received: tuple[int, int] | None = None
        self.receiving: tuple[int, int] | None = None
        self.admitted: set[tuple[int, int]] = set()  # group, times it was lost before
        self.finished: list[tuple[int, int]] = []  # (group, oldest version), not yet announced
        self.evals: set[tuple[str, int]] = set()
        self.n_shards = 0
        self.held = HeldView()
        sim.later(sim.random.uniform(1, 20), self.start)

    def send(self, kind: str, **body: Any) -> None:
        self.sim.send(self.name, self.incarnation, kind, body)

    def start(self) -> None:
        if self.alive:
            self.send("hello", host="h", pid=1, log="l")
            self.send("ready", probe=[1])
            self.beat()

    def beat(self) -> None:
        if self.alive:
            self.send("heartbeat", have=self.held.number)
            self.sim.later(HEARTBEAT_S, self.beat)

    def see(self, news: View) -> None:
        self.held.take(news)
        view = self.held.view
        if not self.alive or view is None or view["stop"]:
            return
        door = view["door"]
        if door:
            self.come_to_door(door)
            return
        if self.received and view["committed"] == self.received[1]:
            self.version, self.received = self.received[1], None
            self.send("installed", version=self.version, pause_s=0.1)
        wanted = {(g, view["again"].get(str(g), 0)) for g in view["groups"]}
        for group_id, _ in sorted(wanted - self.admitted):
            assert self.version is not None, "a group for an engine without weights"
            self.sim.check_generation(self, group_id)
            version = self.version
            self.sim.later(
                self.sim.random.expovariate(0.5), partial(self.finish, group_id, version)
            )
        self.admitted = wanted
        for chunk in view["evals"]:
            key = (chunk["eval_id"], chunk["start"])
            if key not in self.evals:
                self.evals.add(key)
                self.sim.later(self.sim.random.uniform(0.1, 3), partial(self.evaluate, chunk))

    def perhaps_die(self) -> None:
        if self.sim.random.random() < self.sim.trouble / 5:
            self.die()

    def die(self) -> None:
        if self.alive:
            self.alive = False
            reap = partial(self.sim.reap, self.engine_id, self.incarnation)
            self.sim.later(self.sim.random.uniform(0, 3), reap)

    def come_to_door(self, door: View) -> None:
        key = (door["epoch"], door["version"])
        if self.at_door != key:
            self.at_door, self.received, self.receiving = key, None, None
            self.sim.later(self.sim.random.uniform(0, 1), lambda: self.arrive(key))
        if door["go"] and self.receiving != key:
            self.sim.check_go(key, door)
            self.receiving = key
            self.sim.later(self.sim.random.uniform(0, 1), lambda: self.receive(key))

    def arrive(self, key: tuple[int, int]) -> None:
        if self.alive and self.at_door == key:
            self.sim.standing.setdefault(key, set()).add(self.engine_id)
            self.send("at_door", epoch=key[0], version=key[1])
            self.perhaps_die()

    def receive(self, key: tuple[int, int]) -> None:
        if not self.alive or self.at_door != key:
            return
        if self.sim.random.random() < self.sim.trouble / 4:
            self.send("receive_failed", epoch=key[0], version=key[1], error="bad luck")
            return
        self.received = key
        self.send("received", epoch=key[0], version=key[1], digest=str(key))
        self.perhaps_die()

    def finish(self, group_id: int, version: int) -> None:
        if not self.alive:
            return
        self.finished.append((group_id, version))
        if len(self.finished) >= 2 or self.sim.strict:
            self.announce()
        else:
            self.sim.later(1.0, self.announce)

    def announce(self) -> None:
        if self.alive and self.finished:
            path = f"{self.name}/{self.incarnation}/{self.n_shards}"
            self.n_shards += 1
            groups = [{"group_id": g, "oldest_version": v} for g, v in self.finished]
            self.finished = []
            self.send(
                "announce", shard={"path": path, "engine_id": self.engine_id, "groups": groups}
            )

    def evaluate(self, chunk: View) -> None:
        if self.alive:
            n = chunk["stop"] - chunk["start"]
            self.send(
                "eval_result",
                **chunk,
                n=n,
                n_judged=n,
                n_correct=n,
                reward_sum=1.0,
                n_tokens=n,
                n_truncated=0,
            )


class Simulation:
    """Time, network, trainer, and the rules that must hold at every moment."""

    def __init__(
        self, cfg: Config, seed: int, *, trouble: float, start: int = 0, oversamples: bool = False
    ) -> None:
        self.cfg, self.random, self.trouble, self.start = cfg, random.Random(seed), trouble, start
        self.strict = cfg.strict_mode
        self.scheduler = Scheduler(cfg)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.n_events = 0
        self.fifo: dict[tuple[str, int, str], float] = {}
        self.sent: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.sent_views: dict[tuple[str, int], SentView] = defaultdict(SentView)
        self.held = HeldView()
        self.standing: dict[tuple[int, int], set[int]] = {}
        self.trained: list[int] = []
        self.dropped: set[int] = set()
        self.n_dropped_told = 0
        self.oversamples, self.most_spare = oversamples, 0
        self.assigned: dict[int, set[int]] = {}
        self.given_versions: dict[int, int] = {}
        self.done = False
        self.available = self.leftovers()
        self.trainer = self.run_trainer()
        self.wait: Wait = next(self.trainer)
        self.engines: dict[int, Engine] = {}
        for engine_id in range(cfg.generator.n_engines):
            self.start_engine(engine_id, 0)

    # Machinery

    def later(self, delay: float, event: Callable[[], None]) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (self.now + delay, self.n_events, event))

    def in_order(self, key: tuple[str, int, str], event: Callable[[], None]) -> None:
        arrival = max(self.now + self.random.expovariate(20), self.fifo.get(key, 0.0) + 1e-6)
        self.fifo[key] = arrival
        self.later(arrival - self.now, event)

    def send(self, peer: str, incarnation: int, kind: str, body: View) -> None:
        self.sent[peer] = self.sent.get(peer, 0) + 1
        number = self.sent[peer]
        self.in_order(
            (peer, incarnation, "up"), lambda: self.take(peer, incarnation, kind, body, number)
        )

    def take(self, peer: str, incarnation: int, kind: str, body: View, number: int) -> None:
        self.taken[peer] = number
        if kind == "consumed":
            self.n_dropped_told += len(body["dropped"])
        self.scheduler.handle(peer, incarnation, kind, body, self.now)
        if kind == "heartbeat":
            self.push(peer, incarnation, body["have"])
        else:
            self.push()

    def push(self, answered: str | None = None, incarnation: int = 0, have: int = 0) -> None:
        self.check_assignments()
        dirty = self.scheduler.dirty()
        for peer in sorted(dirty | ({answered} if answered else set())):
            engine = self.engines.get(int(peer.split("-")[1])) if peer != "trainer-0" else None
            key = (peer, engine.incarnation if engine else 0)
            says = have if (answered, incarnation) == key else None
            news = self.sent_views[key].news(self.scheduler.view(peer), says)
            if peer != answered and self.random.random() < self.trouble:
                continue  # lost; the answer to the next heartbeat brings it
            if peer == "trainer-0":
                as_of = self.taken.get(peer, 0)
                self.in_order((*key, "down"), partial(self.trainer_sees, news, as_of))
            elif engine:
                self.in_order((*key, "down"), partial(engine.see, news))

    def start_engine(self, engine_id: int, incarnation: int) -> None:
        self.scheduler.starting(f"engine-{engine_id}", incarnation, self.now)
        self.engines[engine_id] = Engine(self, engine_id, incarnation)
        if self.random.random() < self.trouble * 3:
            engine = self.engines[engine_id]
            self.later(self.random.uniform(1, 90), engine.die)

    def reap(self, engine_id: int, incarnation: int) -> None:
        self.scheduler.exited(f"engine-{engine_id}", self.now)
        self.push()
        self.later(self.random.uniform(0, 5), lambda: self.start_engine(engine_id, incarnation + 1))

    def run(self) -> None:
        while not self.done:
            assert self.events, "nothing will ever happen again"
            self.now, _, event = heapq.heappop(self.events)
            assert self.now < 3000, f"no end in sight: {self.scheduler.view('trainer-0')}"
            event()

    # The trainer

    def trainer_sends(self, kind: str, **body: Any) -> None:
        self.send("trainer-0", 0, kind, body)

    def trainer_sees(self, news: View, as_of: int) -> None:
        is_new = self.held.take(news)
        while is_new and not self.done and as_of >= self.sent["trainer-0"]:
            value = self.wait(self.held.view or {})
            if not value:
                return
            try:
                self.wait = self.trainer.send(value)
            except StopIteration:
                self.done = True

    def trainer_beats(self) -> None:
        self.trainer_sends("heartbeat", have=self.held.number)
        self.later(HEARTBEAT_S, self.trainer_beats)

    def run_trainer(self) -> Generator[Wait, Any, None]:
        self.later(0, self.trainer_beats)
        self.trainer_sends(
            "begin",
            consumed=[],
            next_group=self.start * GROUPS_PER_STEP,
            n_dropped=0,
            available=self.available,
            spare=self.new_spare(self.start),
        )
        yield from self.evaluate_and_sync(self.start)
        for step in range(self.start + 1, STEPS + 1):
            while not (yield from self.try_step(step)):
                pass
            yield from self.evaluate_and_sync(step)
        self.trainer_sends("finish", status="done")

    def evaluate_and_sync(self, version: int) -> Generator[Wait, Any, None]:
        self.trainer_sends("evaluate", eval_id=f"v{version}", version=version, n=N_EVAL)
        yield from self.sync(version)
        while True:
            view = yield lambda v: (f"v{version}" in v["evals"] or v["unsynced"]) and v
            if f"v{version}" in view["evals"]:
                assert view["evals"][f"v{version}"]["n"] == N_EVAL
                assert view["evals"][f"v{version}"]["version"] == version
                return
            yield from self.sync(version)

    def sync(self, version: int) -> Generator[Wait, Any, None]:
        while True:
            self.trainer_sends("open_door", version=version, store="s")
            door = (
                yield lambda v: (
                    v["door"] and v["door"]["version"] == version and v["door"]["go"] and v["door"]
                )
            )
            key = {"epoch": door["epoch"], "version": version}
            result = yield partial(self.outcome, door["epoch"])
            yield partial(self.is_later_than, self.now + 4 * self.random.random() * self.trouble)
            if result == "acked" and self.random.random() > self.trouble / 4:
                self.trainer_sends("commit", **key)
                return
            self.trainer_sends("sync_failed", **key, reason="test")

    def is_later_than(self, then: float, view: View) -> bool:
        return self.now > then

    def outcome(self, epoch: int, view: View) -> str | None:
        door = view["door"]
        assert door["epoch"] == epoch, "the epoch changed after go without the trainer's doing"
        if door["failed"]:
            return "failed"
        return "acked" if set(door["acks"]) == set(door["members"]) else None

    def try_step(self, step: int) -> Generator[Wait, Any, bool]:
        seen = [-1.0]
        view = yield lambda v: self.now > seen[0] and (v["shards"] or v["unsynced"]) and v
        if view["unsynced"]:
            yield from self.sync(step - 1)
            return False
        groups = {g["group_id"]: g for shard in view["shards"].values() for g in shard["groups"]}
        settled = self.dropped | set(self.trained)
        fresh = {i: g for i, g in groups.items() if i not in settled}
        if fresh and self.random.random() < self.trouble / 10:
            self.trainer_sends("lost", group_ids=[min(fresh)])
            return False
        useless = [i for i, g in fresh.items() if self.is_useless(step, g)]
        if useless:
            self.dropped.update(useless)
            self.settle(step - 1, [], useless)
            return False
        ids = sorted(fresh)
        if self.cfg.algorithm.order == "strict":
            cursor = (g for g in itertools.count(self.start * GROUPS_PER_STEP) if g not in settled)
            ids = list(itertools.takewhile(lambda g: g in fresh, cursor))
        if len(ids) < GROUPS_PER_STEP:
            yield (
                lambda v: (
                    {g["group_id"] for s in v["shards"].values() for g in s["groups"]} - settled
                    != set(fresh)
                    or v["unsynced"]
                )
            )
            return False
        self.trained += ids[:GROUPS_PER_STEP]
        self.settle(step, ids[:GROUPS_PER_STEP], [])
        return True

    def settle(self, version: int, ids: list[int], dropped: list[int]) -> None:
        spare = self.new_spare(version)
        self.trainer_sends("consumed", version=version, group_ids=ids, dropped=dropped, spare=spare)

    def new_spare(self, version: int) -> int:
        """Groups beyond the need, as a trainer asks for that expects to drop some."""
        spare = self.random.choice([0, 3]) if self.oversamples and version < STEPS else 0
        self.most_spare = max(self.most_spare, spare)
        return spare

    def is_useless(self, step: int, group: View) -> bool:
        no_signal = self.trouble > 0 and group["group_id"] % 7 == 3
        staleness: int = step - 1 - group["oldest_version"]
        return no_signal or staleness > self.cfg.algorithm.max_staleness

    def leftovers(self) -> list[View]:
        """Shards of an earlier attempt, for a run that resumes: in strict mode one engine's whole
        share.
        """
        if not self.start:
            return []
        ids = range(self.start * GROUPS_PER_STEP, (self.start + 1) * GROUPS_PER_STEP)
        n = self.cfg.generator.n_engines
        mine = [g for g in ids if g % n == 0] if self.strict else ids[::2]
        return [
            {"path": "old", "groups": [{"group_id": g, "oldest_version": self.start} for g in mine]}
        ]

    # Rules

    def check_assignments(self) -> None:
        """No engine is ever given a group beyond what its installed version allows."""
        for engine_id, card in enumerate(self.scheduler.view("trainer-0")["engines"].values()):
            groups = set(card["groups"])
            for group_id in groups - self.assigned.get(engine_id, set()):
                bound = card["version"] + 1 + self.cfg.algorithm.max_staleness
                n_more = self.n_dropped_told + self.most_spare
                assert group_id < GROUPS_PER_STEP * min(bound, STEPS) + n_more
                assert not self.strict or group_id % self.cfg.generator.n_engines == engine_id
            self.assigned[engine_id] = groups
        owned = [g for groups in self.assigned.values() for g in groups]
        assert len(owned) == len(set(owned)), "a group with two owners"
        shards = self.scheduler.view("trainer-0")["shards"].values()
        announced = [g["group_id"] for shard in shards for g in shard["groups"]]
        assert len(announced) == len(set(announced)), "a group in two shards"
        assert not set(owned) & set(announced), "a group that is there is to be made again"

    def check_generation(self, engine: Engine, group_id: int) -> None:
        assert not self.strict or group_id % self.cfg.generator.n_engines == engine.engine_id
        assert group_id not in {
            g for s in self.available for g in (x["group_id"] for x in s["groups"])
        } or (
            self.trouble > 0  # a damaged shard's groups are made again
        )

    def check_go(self, key: tuple[int, int], door: View) -> None:
        n_there = len(self.standing[key])
        assert door["world_size"] == 1 + n_there, "somebody entered before all were at the door"


def config(n_engines: int, max_staleness: int, order: str) -> Config:
    return Config(
        run=RunConfig(steps=STEPS),
        model=ModelConfig(path="none"),
        algorithm=AlgorithmConfig(
            groups_per_step=GROUPS_PER_STEP,
            group_size=16,
            max_staleness=max_staleness,
            order="strict" if order == "strict" else "ready",
        ),
        generator=GeneratorConfig(n_engines=n_engines),
    )


def check_history(
    cfg: Config, seed: int, *, trouble: float, start: int = 0, oversamples: bool = False
) -> Simulation:
    simulation = Simulation(cfg, seed, trouble=trouble, start=start, oversamples=oversamples)
    simulation.run()
    first = start * GROUPS_PER_STEP
    n = GROUPS_PER_STEP * (STEPS - start)
    assert len(simulation.trained) == len(set(simulation.trained)) == n
    settled = sorted(simulation.dropped | set(simulation.trained))
    if not oversamples:  # else some are generated and never looked at
        assert settled == list(range(first, first + n + len(simulation.dropped)))
    return simulation


@pytest.mark.parametrize("n_engines", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("max_staleness", "order"),
    [(0, "strict"), (0, "ready"), (1, "strict"), (1, "ready"), (2, "ready")],
)
def test_every_history_ends_with_every_group_settled_once(
    n_engines: int, max_staleness: int, order: str
) -> None:
    cfg = config(n_engines, max_staleness, order)
    for seed in range(12):
        check_history(
            cfg,
            seed,
            trouble=[0.0, 0.1, 0.3][seed % 3],
            start=[0, 2][seed % 2],
            oversamples=seed % 4 > 1,
        )


@pytest.mark.slow
@pytest.mark.parametrize("n_engines", [1, 2, 3, 4])
def test_thousands_of_histories_end(n_engines: int) -> None:
    for seed in range(1000, 1600):
        kind = [(0, "strict"), (0, "ready"), (1, "strict"), (1, "ready"), (3, "ready")][seed % 5]
        check_history(config(n_engines, *kind), seed, trouble=[0.1, 0.3][seed % 2], start=seed % 3)


def test_strict_mode_hands_out_the_same_shares_whatever_the_delays() -> None:
    cfg = config(3, 0, "strict")
    orders = {tuple(check_history(cfg, seed, trouble=0.0).trained) for seed in range(5)}
    assert orders == {tuple(range(GROUPS_PER_STEP * STEPS))}
