"""The door to a new version, with a death at each stage."""

from __future__ import annotations

import pytest

from scheduler_bench import LEADER, Bench, config
from slurm_grpo.errors import MessageError


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
    bench.tell(LEADER, "consumed", version=1, group_ids=[1], dropped=[0], spare=0)
    assert bench.view(0)["groups"] == [3]
    assert bench.view(0)["committed"] is None
    bench.arrive(0)
    bench.receive(0)
    bench.leader_says("commit")
    assert bench.view(0)["groups"] == [3], "committed, but not installed yet"
    bench.tell("engine-0", "installed", version=1)
    assert bench.view(0)["groups"] == [3, 4, 5, 6]
