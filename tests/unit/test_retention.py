"""What `staging.keep` lets go, and when."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from sample_episodes import (
    begin_attempt,
    commit_step,
    make_books,
    make_header,
    mark_saved,
    publish_ids,
    take_step,
)
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import AlgorithmConfig, Config, StagingConfig
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.staging.manifest import load_state
from slurm_grpo.staging.retention import Retention
from slurm_grpo.staging.shards import list_shards
from slurm_grpo.staging.verify import verify_run

Keep = Literal["all", "trained", "recent"]


def retention(run: RunDir, keep: Keep, keep_steps: int | None = None) -> Retention:
    staging = StagingConfig(keep=keep, keep_steps=keep_steps)
    cfg = Config(algorithm=AlgorithmConfig(groups_per_step=2), staging=staging)
    freeze_config(cfg, run.config)
    return Retention(cfg, run, max(run.attempt_numbers()))


def left(run: RunDir) -> list[int]:
    """Sequences of the shards still there."""
    return [name.sequence for _, name in list_shards(run)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_books(tmp_path_factory.mktemp("original"))
    for step in (1, 2, 3):
        take_step(run, step)
    path = publish_ids(run, 6, 7, version=3, header=make_header(sequence=4))
    commit_step(run, 4, path, 6, 7, dropped=(20,))
    publish_ids(run, 0, version=0, header=make_header(incarnation=1, sequence=9))
    publish_ids(run, 20, version=3, header=make_header(sequence=8))
    return run.root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> RunDir:
    """Four steps, shards 1 to 4; shard 9 holds a copy of group 0; shard 8 what step 4 dropped."""
    return RunDir(shutil.copytree(original, tmp_path / "run"))


@pytest.mark.parametrize(
    ("keep", "keep_steps", "saved", "stay"),
    [
        ("all", None, (2, 4), [1, 2, 3, 4, 8, 9]),
        ("trained", None, (2,), [1, 2, 3, 4, 8]),  # step 4 is not covered yet
        ("trained", None, (4,), [1, 2, 3, 4]),
        ("trained", None, (2, 4), [1, 2, 3, 4, 8]),  # a fall-back to step 2 needs group 20 again
        ("recent", 2, (4,), [3, 4]),
        ("recent", 1, (2, 4), [3, 4, 8]),
        ("recent", 100, (4,), [1, 2, 3, 4]),
    ],
)
def test_what_stays(
    run: RunDir, keep: Keep, keep_steps: int | None, saved: tuple[int, ...], stay: list[int]
) -> None:
    mark_saved(run, *saved)
    assert retention(run, keep, keep_steps).apply(saved[-1]) == 6 - len(stay)
    assert left(run) == stay
    assert verify_run(run) == []


def test_a_shard_with_a_group_still_to_come_stays_whole(run: RunDir) -> None:
    path = publish_ids(run, 8, 9, 10, version=4, header=make_header(sequence=5))
    commit_step(run, 5, path, 8, 9)
    mark_saved(run, 5)
    retention(run, "recent", 1).apply(5)
    assert left(run) == [5]
    other = publish_ids(run, 11, version=4, header=make_header(sequence=6))
    commit_step(run, 6, other, 11)
    mark_saved(run, 6)
    assert retention(run, "recent", 1).apply(6) == 0
    assert left(run) == [5, 6]


def test_what_a_killed_attempt_made_and_nobody_can_use_goes(run: RunDir) -> None:
    begin_attempt(run, 1, 1)
    for step in (2, 3, 4):
        take_step(run, step)
    mark_saved(run, 4)
    retention(run, "trained").apply(4)
    names = [(name.attempt, name.sequence) for _, name in list_shards(run)]
    assert names == [(0, 1), (1, 2), (1, 3), (1, 4)]
    assert verify_run(run) == []


def test_a_resume_after_retention_stands_where_it_stood_before(run: RunDir) -> None:
    publish_ids(run, 8, 9, version=4, header=make_header(sequence=5))
    mark_saved(run, 4)
    resume = partial(load_state, run, 4, strict=True, groups_per_step=2, max_staleness=0)
    before = resume()
    assert [ref.path for ref in before.available]
    retention(run, "recent", 1).apply(4)
    assert left(run) == [4, 5]
    assert resume() == before


def test_a_kill_between_record_and_removal_is_made_good_by_the_next_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_saved(run, 4)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slurm_grpo.staging.retention.remove_shards", killed)
        with pytest.raises(KeyboardInterrupt):
            retention(run, "recent", 2).apply(4)
    assert left(run) == [1, 2, 3, 4, 8, 9]
    assert verify_run(run) == []
    begin_attempt(run, 1, 4)
    take_step(run, 5)
    mark_saved(run, 5)
    retention(run, "recent", 2).apply(5)
    assert left(run) == [4, 5]
    assert len(read_ledger(run).retired) == 5
    assert verify_run(run) == []
