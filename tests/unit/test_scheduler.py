"""The scheduler's rules one by one: assignment, the door with a death at each stage, liveness."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from slurm_grpo.config import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from slurm_grpo.control.messages import MessageError
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
        self.scheduler.trainer_starting(0, self.now)
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
        }
        self.tell(LEADER, "begin", **body | changes)

    def start(self, engine: int) -> None:
        self.incarnations[engine] += 1
        self.scheduler.engine_starting(engine, self.incarnations[engine], self.now)
        peer = f"engine-{engine}"
        self.tell(peer, "hello", host=f"node{engine}", pid=1, log=f"{peer}.log")
        self.tell(peer, "ready", probe=[])

    def exit(self, engine: int) -> None:
        self.scheduler.engine_exited(engine, self.now)

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


# Assignment


def test_nothing_is_assigned_before_begin_nor_before_the_first_version_is_installed() -> None:
    bench = Bench(config(), begin=False)
    bench.sync(0)
    assert bench.view(0)["groups"] == []
    bench.begin()
    assert bench.view(0)["groups"] == [0, 2]
    other = Bench(config())
    assert other.view(0)["groups"] == []


def test_strict_mode_gives_an_engine_its_whole_share_at_once_and_never_moves_it() -> None:
    bench = Bench(config())
    bench.sync(0)
    assert bench.view(1)["groups"] == [1, 3]
    bench.exit(1)
    assert bench.view(0)["groups"] == [0, 2]
    bench.start(1)
    assert bench.view(1)["groups"] == [], "no weights yet"
    assert bench.leader["unsynced"] == ["engine-1"]
    bench.sync(0)
    assert bench.view(1)["groups"] == [1, 3]
    assert bench.view(0)["groups"] == [0, 2]


def test_a_dead_engines_groups_go_to_the_others_outside_strict_mode() -> None:
    bench = Bench(config(max_staleness=1))
    bench.sync(0)
    assert bench.view(0)["groups"] == [0, 1, 4, 6]
    assert bench.view(1)["groups"] == [2, 3, 5, 7]
    bench.announce(1, 3)
    bench.exit(1)
    assert bench.view(0)["groups"] == [0, 1, 2, 4, 5, 6, 7]


def test_the_staleness_bound_follows_installed_versions_and_drops() -> None:
    bench = Bench(config(1, max_staleness=1, groups_per_step=2))
    bench.sync(0)
    assert bench.view(0)["groups"] == [0, 1, 2, 3]
    bench.announce(0, 0, 1, 2)
    bench.tell(LEADER, "consumed", step=1, group_ids=[0], dropped=[1])
    assert bench.view(0)["groups"] == [3, 4]
    bench.sync(1)
    assert bench.view(0)["groups"] == [3, 4, 5, 6]


def test_no_group_beyond_the_last_step_is_assigned() -> None:
    bench = Bench(config(1, max_staleness=3, order="ready", groups_per_step=2, steps=2))
    bench.sync(0)
    bench.announce(0, 0, 1)
    assert bench.view(0)["groups"] == [2, 3]


def test_an_engine_owes_no_more_groups_than_it_can_decode_and_one() -> None:
    bench = Bench(config(1, max_staleness=9, groups_per_step=8, order="ready"))
    bench.sync(0)
    assert len(bench.view(0)["groups"]) == 64 // 8 + 1


def test_groups_announced_before_a_resume_are_not_generated_again() -> None:
    bench = Bench(config(), begin=False)
    old = {"path": "old", "groups": [{"group_id": g} for g in (9, 11)]}
    bench.begin(version=2, available=[old])
    bench.sync(2)
    assert bench.view(0)["groups"] == [8, 10]
    assert bench.view(1)["groups"] == []
    assert bench.announced() == [9, 11]


def test_groups_consumed_out_of_order_before_a_resume_are_skipped() -> None:
    bench = Bench(config(1, order="ready"), begin=False)
    bench.begin(version=1, next_group=2, consumed=[3, 4])
    bench.sync(1)
    assert bench.view(0)["groups"] == [2, 5, 6, 7]


def test_the_first_announcement_of_a_group_wins() -> None:
    bench = Bench(config(max_staleness=1))
    bench.sync(0)
    bench.announce(0, 0, 2, path="a")
    bench.announce(1, 1, 2, path="b")
    assert list(bench.leader["shards"]) == ["a", "b"]
    assert bench.announced() == [0, 2, 1]
    bench.tell(LEADER, "consumed", step=1, group_ids=[0, 2], dropped=[])
    bench.announce(1, 0, path="c")
    assert bench.announced() == [1]


def test_an_announcement_of_a_dead_incarnation_is_ignored() -> None:
    bench = Bench(config(max_staleness=1))
    bench.sync(0)
    bench.exit(0)
    bench.announce(0, 0)
    assert bench.announced() == []
    bench.start(0)
    bench.scheduler.handle(
        "engine-0", 0, "announce", {"shard": {"path": "x", "groups": [{"group_id": 0}]}}, bench.now
    )
    assert bench.announced() == []


def test_a_group_of_a_damaged_shard_is_generated_again() -> None:
    bench = Bench(config())
    bench.sync(0)
    bench.announce(0, 0, 2)
    bench.tell(LEADER, "lost", group_ids=[2])
    assert bench.announced() == [0]
    assert bench.view(0)["groups"] == [2]
    assert bench.view(0)["again"] == {"2": 1}, "tells it from the first order for this group"
    bench.announce(0, 2)
    assert bench.announced() == [0, 2]


def test_a_group_that_nobody_was_asked_for_is_refused() -> None:
    bench = Bench(config())
    bench.sync(0)
    with pytest.raises(MessageError, match=r"group 77 of shard1 was never assigned"):
        bench.announce(0, 77)


# The door


def test_everybody_goes_only_when_all_are_at_the_door() -> None:
    bench = Bench(config(tensor_parallel=2))
    bench.open(0)
    assert bench.view(1)["door"] == {
        "epoch": 1,
        "version": 0,
        "store": "t:1",
        "first_rank": 3,
        "world_size": 5,
        "go": False,
    }
    bench.arrive(0)
    assert not bench.door["go"]
    assert bench.door["arrived"] == ["engine-0"]
    bench.arrive(1)
    assert bench.door["go"]
    assert bench.view(0)["door"]["go"]
    assert bench.view(1)["door"]["go"]
    assert bench.door["members"] == {"engine-0": 1, "engine-1": 3}


def test_an_epoch_whose_members_lived_is_used_again() -> None:
    bench = Bench(config())
    bench.sync(0)
    bench.open(1)
    assert bench.door["epoch"] == 1
    bench.arrive(0, 1)
    bench.receive(0, 1)
    bench.leader_says("commit")
    bench.open(1)
    assert bench.door["epoch"] == 2, "the same version twice through one epoch cannot be told apart"


def test_a_death_before_go_forms_a_new_epoch_without_the_dead() -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0)
    bench.exit(1)
    assert bench.door["epoch"] == 2
    assert bench.door["members"] == {"engine-0": 1}
    assert not bench.door["go"]
    bench.arrive(0)
    assert bench.door["go"]


def test_an_engine_that_becomes_ready_before_go_joins_the_door() -> None:
    bench = Bench(config(), ready=False)
    bench.open(0)
    assert bench.door["members"] == {}
    assert not bench.door["go"]
    bench.start(1)
    assert bench.door["members"] == {"engine-1": 1}
    bench.start(0)
    assert bench.door["members"] == {"engine-0": 1, "engine-1": 2}
    assert bench.leader["unsynced"] == []


def test_a_death_between_go_and_receipt_is_reported_and_the_next_epoch_has_the_living() -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0, 1)
    bench.receive(0)
    bench.exit(1)
    assert bench.door["failed"] == {"engine-1": "exited during the transfer"}
    assert bench.door["acks"] == {"engine-0": "d"}
    bench.start(1)
    bench.arrive(1)
    bench.receive(1)
    assert bench.view(1)["door"] is None, "the epoch belongs to its predecessor"
    assert bench.door["acks"] == {"engine-0": "d"}
    bench.exit(1)
    bench.leader_says("sync_failed", reason="engine-1 died")
    assert bench.door["epoch"] == 2
    assert bench.door["version"] == 0
    assert bench.door["members"] == {"engine-0": 1}
    bench.arrive(0)
    bench.receive(0)
    bench.leader_says("commit")
    assert bench.view(0)["committed"] == 0


@pytest.mark.parametrize("restarts_before_commit", [True, False])
def test_a_death_between_receipt_and_commit_leaves_the_commit_to_the_living(
    restarts_before_commit: bool,
) -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0, 1)
    bench.receive(0, 1)
    bench.exit(1)
    if restarts_before_commit:
        bench.start(1)
        assert bench.view(1)["door"] is None, "the epoch belongs to its predecessor"
    assert bench.door["failed"] == {}
    bench.leader_says("commit")
    if not restarts_before_commit:
        bench.start(1)
    assert bench.view(0)["committed"] == 0
    assert bench.view(1)["committed"] is None
    assert bench.leader["unsynced"] == ["engine-1"]


def test_a_death_between_commit_and_installation_asks_for_another_sync() -> None:
    bench = Bench(config(max_staleness=1))
    bench.open(0)
    bench.arrive(0, 1)
    bench.receive(0, 1)
    bench.leader_says("commit")
    bench.tell("engine-0", "installed", version=0)
    bench.exit(1)
    assert bench.leader["unsynced"] == []
    assert bench.view(0)["groups"] == list(range(8))
    bench.start(1)
    assert bench.leader["unsynced"] == ["engine-1"]


def test_the_death_of_the_only_member_makes_the_door_wait_for_the_next_one() -> None:
    bench = Bench(config(1))
    bench.open(0)
    bench.arrive(0)
    bench.exit(0)
    bench.leader_says("sync_failed", reason="nobody left")
    assert bench.door["members"] == {}
    assert not bench.door["go"]
    bench.start(0)
    assert bench.door["members"] == {"engine-0": 1}
    bench.arrive(0)
    assert bench.door["go"]


def test_a_failed_receipt_is_shown_and_retried_with_the_same_engines() -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0, 1)
    bench.engine_says(1, "receive_failed", error="timed out")
    assert bench.door["failed"] == {"engine-1": "timed out"}
    bench.leader_says("sync_failed", reason="timed out")
    assert bench.door["epoch"] == 2
    assert sorted(bench.door["members"]) == ["engine-0", "engine-1"]


def test_messages_of_a_closed_epoch_change_nothing() -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0, 1)
    bench.leader_says("sync_failed", reason="test")
    before = bench.leader["door"]
    for kind, more in (
        ("at_door", {}),
        ("received", {"digest": "d"}),
        ("receive_failed", {"error": "e"}),
    ):
        bench.tell("engine-0", kind, epoch=1, version=0, **more)
    bench.tell(LEADER, "sync_failed", epoch=1, version=0, reason="late")
    assert bench.leader["door"] == before


def test_a_commit_without_a_transfer_is_refused() -> None:
    bench = Bench(config())
    bench.open(0)
    with pytest.raises(MessageError, match="epoch 1, version 0 is not in transfer"):
        bench.leader_says("commit")


def test_no_new_groups_are_given_while_the_door_is_open() -> None:
    bench = Bench(config(1, max_staleness=1, groups_per_step=2))
    bench.sync(0)
    bench.open(1)
    bench.announce(0, 0, 1, 2)
    bench.tell(LEADER, "consumed", step=1, group_ids=[1], dropped=[0])
    assert bench.view(0)["groups"] == [3]
    assert bench.view(0)["committed"] is None
    bench.arrive(0)
    bench.receive(0)
    bench.leader_says("commit")
    assert bench.view(0)["groups"] == [3], "committed, but not installed yet"
    bench.tell("engine-0", "installed", version=1)
    assert bench.view(0)["groups"] == [3, 4, 5, 6]


# Evaluation


def finish_chunks(bench: Bench, engine: int) -> int:
    chunks = bench.view(engine)["evals"]
    for chunk in chunks:
        n = chunk["stop"] - chunk["start"]
        sums = {"n": n, "n_judged": n, "n_correct": 1, "reward_sum": 0.5}
        sums |= {"n_tokens": 2 * n, "n_truncated": 0}
        bench.tell(f"engine-{engine}", "eval_result", **chunk, **sums)
    return len(chunks)


def test_an_evaluation_is_split_and_a_dead_engines_chunks_are_done_by_another() -> None:
    bench = Bench(config())
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=128)
    bench.sync(0)
    assert len(bench.view(0)["evals"]) == len(bench.view(1)["evals"]) == 2
    bench.exit(1)
    while finish_chunks(bench, 0):
        pass
    assert bench.leader["evals"] == {
        "before": {
            "version": 0,
            "n": 128,
            "n_judged": 128,
            "n_correct": 4,
            "reward_sum": 2.0,
            "n_tokens": 256,
            "n_truncated": 0,
        }
    }


def test_in_strict_mode_no_groups_are_given_while_an_evaluation_is_pending() -> None:
    bench = Bench(config(1))
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=8)
    bench.sync(0)
    assert bench.view(0)["groups"] == []
    finish_chunks(bench, 0)
    assert bench.view(0)["groups"] == [0, 1, 2, 3]


def test_the_door_to_a_new_version_is_refused_while_an_evaluation_needs_the_old_one() -> None:
    bench = Bench(config(1, max_staleness=1))
    bench.sync(0)
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=8)
    with pytest.raises(MessageError, match="would end the evaluations before"):
        bench.open(1)
    bench.open(0)


# Liveness


def test_a_silent_engine_is_overdue_and_the_text_names_host_and_log() -> None:
    bench = Bench(config())
    bench.now += 50
    bench.tell("engine-0", "heartbeat")
    bench.tell(LEADER, "heartbeat")
    assert bench.scheduler.overdue_peers(bench.now + 5) == {}
    assert bench.scheduler.overdue_peers(bench.now + 15) == {
        "engine-1": "engine-1 on node1: no heartbeat for 65 s (cluster.heartbeat_timeout_s). "
        "Read engine-1.log"
    }


def test_a_process_that_never_becomes_ready_is_overdue() -> None:
    bench = Bench(config(1), ready=False)
    bench.scheduler.engine_starting(0, 0, bench.now)
    bench.now += 601
    bench.tell(LEADER, "heartbeat")
    (text,) = bench.scheduler.overdue_peers(bench.now).values()
    assert text == "engine-0: not ready 601 s after its start (cluster.start_timeout_s)."


def test_an_engine_that_stays_away_from_the_door_is_overdue_even_as_others_come_and_go() -> None:
    bench = Bench(config(3))
    bench.open(0)
    bench.now += 200
    bench.exit(2)
    bench.now += 101
    bench.arrive(0)
    for peer in ("engine-0", "engine-1", LEADER):
        bench.tell(peer, "heartbeat")
    assert bench.scheduler.overdue_peers(bench.now) == {
        "engine-1": "engine-1 on node1: not at the door for version 0 after 301 s "
        "(weight_sync.door_timeout_s). Read engine-1.log"
    }


def test_an_engine_that_never_installs_what_was_committed_is_overdue() -> None:
    bench = Bench(config(1))
    bench.open(0)
    bench.arrive(0)
    bench.receive(0)
    bench.leader_says("commit")
    bench.now += 301
    bench.tell("engine-0", "heartbeat")
    bench.tell(LEADER, "heartbeat")
    (text,) = bench.scheduler.overdue_peers(bench.now).values()
    assert "version 0 not installed 301 s after its commit" in text


def test_peers_are_not_blamed_for_a_pause_of_the_supervisor_itself() -> None:
    bench = Bench(config(1))
    bench.scheduler.tick(bench.now)
    bench.now += 1000
    bench.scheduler.tick(bench.now)
    assert bench.scheduler.overdue_peers(bench.now) == {}


# Views


def test_only_peers_whose_view_changed_are_dirty() -> None:
    bench = Bench(config(n_ranks=2))
    assert bench.scheduler.dirty() == {LEADER, "trainer-1", "engine-0", "engine-1"}
    bench.now += 1
    bench.tell("engine-0", "heartbeat")
    assert bench.scheduler.dirty() == set()
    assert bench.leader["heartbeat_ages_s"]["engine-1"] == 1.0
    bench.open(0)
    assert bench.scheduler.dirty() == {LEADER, "engine-0", "engine-1"}
    bench.tell(LEADER, "trainer_store", address="t:2")
    assert bench.scheduler.dirty() == {LEADER, "trainer-1"}
    assert bench.scheduler.view("trainer-1") == {"stop": None, "trainer_store": "t:2"}


def test_views_are_plain_json() -> None:
    bench = Bench(config())
    bench.open(0)
    bench.arrive(0, 1)
    bench.receive(0)
    for peer in (LEADER, "engine-0"):
        view = bench.scheduler.view(peer)
        assert json.loads(json.dumps(view)) == view


def test_a_stop_reaches_everybody_and_its_first_reason_stands() -> None:
    bench = Bench(config(n_ranks=2))
    bench.scheduler.dirty()
    bench.scheduler.request_stop("trainer-1 died", bench.now)
    bench.scheduler.request_stop("another", bench.now)
    assert bench.scheduler.dirty() == {LEADER, "trainer-1", "engine-0", "engine-1"}
    assert {bench.scheduler.view(p)["stop"] for p in ("engine-1", "trainer-1")} == {
        "trainer-1 died"
    }


def test_a_boundary_stop_reaches_the_trainer_only() -> None:
    bench = Bench(config())
    bench.scheduler.dirty()
    bench.scheduler.request_boundary_stop()
    assert bench.scheduler.dirty() == {LEADER}
    assert bench.leader["boundary_stop"]


def test_engines_leave_when_the_trainer_finishes() -> None:
    bench = Bench(config())
    bench.tell(LEADER, "progress", step=3)
    bench.tell(LEADER, "finish", status="done")
    assert bench.scheduler.finished == "done"
    assert bench.scheduler.progress == {"step": 3}
    assert bench.view(0)["stop"] == "the run is finished"
    assert bench.leader["stop"] is None


def test_a_replaced_incarnation_is_told_to_stop() -> None:
    bench = Bench(config())
    bench.sync(0)
    bench.exit(0)
    bench.start(0)
    view = bench.scheduler.view("engine-0", incarnation=0)
    assert view["stop"] == "replaced by incarnation 1"
    assert bench.scheduler.view("engine-0", incarnation=1)["stop"] is None


@pytest.mark.parametrize(
    ("peer", "kind", "body", "text"),
    [
        ("engine-0", "reddy", {}, "engine-0: unknown message 'reddy'; expected one of announce"),
        ("engine-9", "ready", {"probe": []}, "this run has no engine-9; it has engine-0, engine-1"),
        ("nobody", "ready", {}, "no peer is called 'nobody'"),
        ("engine-0", "commit", {"epoch": 1, "version": 0}, "unknown message 'commit'"),
        ("engine-0", "at_door", {"epoch": 1}, "at_door: key 'version' is missing"),
        ("engine-0", "at_door", {"epoch": -1, "version": 0}, "epoch has the unusable value '-1'"),
        ("engine-0", "installed", {"version": True}, "version has the unusable value 'True'"),
        ("engine-0", "announce", {"shard": {"path": "x"}}, "shard has the unusable value"),
        (LEADER, "begin", {"n_dropped": 0}, "begin: key 'next_group' is missing"),
        (LEADER, "consumed", {"step": 1, "group_ids": ["a"], "dropped": []}, "group_ids has the"),
    ],
)
def test_a_malformed_message_is_refused_by_name(
    peer: str, kind: str, body: dict[str, Any], text: str
) -> None:
    with pytest.raises(MessageError) as error:
        Scheduler(config()).handle(peer, 0, kind, body, 0.0)
    assert text in str(error.value)


# Speed


def test_a_step_of_256_engines_and_64_trainers_costs_little() -> None:
    cfg = config(256, n_ranks=64, groups_per_step=1024, max_staleness=1)
    bench = Bench(cfg, ready=False)
    for engine in range(256):
        bench.start(engine)
    for rank in range(1, 64):
        bench.scheduler.handle(
            f"trainer-{rank}", 0, "hello", {"host": "t", "pid": 1, "log": "l"}, 0
        )
    bench.sync(0)
    bench.scheduler.dirty()
    messages: list[tuple[str, str, dict[str, Any]]] = []
    for engine in range(256):
        groups = [{"group_id": g} for g in bench.view(engine)["groups"]]
        shard = {"path": f"shard{engine}", "groups": groups}
        messages.append((f"engine-{engine}", "announce", {"shard": shard}))
    key = {"epoch": 1, "version": 1}
    messages.append(
        (LEADER, "consumed", {"step": 1, "group_ids": list(range(1024)), "dropped": []})
    )
    messages.append((LEADER, "open_door", {"version": 1, "store": "t:1"}))
    messages += [(f"engine-{engine}", "at_door", key) for engine in range(256)]
    messages += [(f"engine-{engine}", "received", key | {"digest": "d"}) for engine in range(256)]
    messages.append((LEADER, "commit", key))
    messages += [(f"engine-{engine}", "installed", {"version": 1}) for engine in range(256)]
    started = time.process_time()
    for number, (peer, kind, body) in enumerate(messages):
        bench.scheduler.handle(peer, 0, kind, body, bench.now)
        if number % 8 == 0:  # the server takes what has arrived, then looks once
            bench.scheduler.dirty()
    seconds = time.process_time() - started
    assert sum(len(bench.view(engine)["groups"]) for engine in range(256)) == 2048 - 1024
    assert seconds < 0.4, f"{seconds:.3f} s, 0.08 s on an idle machine of 2026"
