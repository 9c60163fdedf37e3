"""What is given to whom: shares, bounds, deaths, announcements."""

from __future__ import annotations

import pytest

from scheduler_bench import LEADER, Bench, config
from slurm_grpo.errors import MessageError


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
    bench.tell(LEADER, "consumed", version=1, group_ids=[0], dropped=[1], spare=0)
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
    bench.tell(LEADER, "consumed", version=1, group_ids=[0, 2], dropped=[], spare=0)
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


def test_a_round_with_spare_groups_is_given_out_whole_and_only_from_its_version_on() -> None:
    bench = Bench(config(groups_per_step=2))
    bench.sync(0)
    bench.announce(0, 0)
    bench.announce(1, 1)
    bench.tell(LEADER, "consumed", version=0, group_ids=[], dropped=[1], spare=1)
    assert (bench.view(0)["groups"], bench.view(1)["groups"]) == ([2], [3])
    bench.announce(0, 2)
    bench.announce(1, 3)
    bench.tell(LEADER, "consumed", version=1, group_ids=[0, 2], dropped=[3], spare=3)
    assert (bench.view(0)["groups"], bench.view(1)["groups"]) == ([], []), "the weights are old"
    bench.sync(1)
    assert (bench.view(0)["groups"], bench.view(1)["groups"]) == ([4, 6, 8], [5, 7])
