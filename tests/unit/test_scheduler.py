"""Liveness, views and the cost of a step."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from scheduler_bench import LEADER, Bench, config
from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.errors import MessageError

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
    bench.scheduler.starting("engine-0", 0, bench.now)
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
        ("engine-0", "at_door", {"epoch": 1}, "at_door: version missing"),
        (
            LEADER,
            "begin",
            {"n_dropped": 0},
            "begin: available, consumed, next_group, spare missing",
        ),
        ("engine-0", "at_door", {"epoch": -1, "version": 0}, "epoch has the unusable value '-1'"),
        ("engine-0", "installed", {"version": True}, "version has the unusable value 'True'"),
        ("engine-0", "announce", {"shard": {"path": "x"}}, "shard has the unusable value"),
        (
            "engine-0",
            "announce",
            {"shard": {"path": "x", "groups": [{}]}},
            "shard has the unusable",
        ),
        ("engine-0", "eval_result", {"eval_id": "0", "start": 0, "stop": 1}, "n, n_correct, n_jud"),
        (
            LEADER,
            "consumed",
            {"version": 1, "group_ids": ["a"], "dropped": [], "spare": 0},
            "group_ids has the",
        ),
        (LEADER, "finish", {"status": None}, "status has the unusable value 'None'"),
        (LEADER, "progress", ["step", 1], "progress: the body is no object"),
    ],
)
def test_a_malformed_message_is_refused_by_name(
    peer: str, kind: str, body: dict[str, Any], text: str
) -> None:
    with pytest.raises(MessageError) as error:
        Scheduler(config()).handle(peer, 0, kind, body, 0.0)
    assert text in str(error.value)


def test_keys_called_like_a_handlers_own_are_only_keys() -> None:
    scheduler = Scheduler(config())
    scheduler.handle(LEADER, 0, "progress", {"self": 1, "sender": 2}, 0.0)
    assert scheduler.progress == {"self": 1, "sender": 2}


# Speed


def test_a_step_of_256_engines_and_64_trainers_costs_little() -> None:
    # 0.08 s on an idle machine of 2026; the best of three, since it may have other work.
    assert any(seconds_of_a_step_of_256_engines_and_64_trainers() < 0.4 for _ in range(3))


def seconds_of_a_step_of_256_engines_and_64_trainers() -> float:
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
        (
            LEADER,
            "consumed",
            {"version": 1, "group_ids": list(range(1024)), "dropped": [], "spare": 0},
        )
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
    return seconds
