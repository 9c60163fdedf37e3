"""Merging shards: nothing lost, nothing twice, whatever the instant of a kill."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sample_episodes import (
    assert_same_groups,
    begin_attempt,
    make_books,
    make_group,
    make_header,
    mark_saved,
    publish_ids,
    take_step,
)
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import AlgorithmConfig, Config, RunConfig
from slurm_grpo.errors import ConfigError, ExitCode, ShardError
from slurm_grpo.run.attempt import RunLock
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging import compact, layout
from slurm_grpo.staging.compact import Compaction, add_arguments, compact_run, join_columns
from slurm_grpo.staging.compact import run as run_command
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.staging.manifest import load_state
from slurm_grpo.staging.shards import list_shards, read_groups, read_ref
from slurm_grpo.staging.verify import audit_run, verify_run
from slurm_grpo.types import Group


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_books(tmp_path_factory.mktemp("original"))
    for step in (1, 2, 3, 4, 5):
        take_step(run, step)
    begin_attempt(run, 1, 3)
    for step in (4, 5):
        take_step(run, step)
    mark_saved(run, 5)
    return run.root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> RunDir:
    """Five steps by attempt 0, of which attempt 1 goes over 4 and 5 again; saved at step 5."""
    return RunDir(shutil.copytree(original, tmp_path / "run"))


def all_groups(run: RunDir) -> dict[tuple[int, int], Group]:
    """Every group of every shard, by attempt and group id."""
    found: dict[tuple[int, int], Group] = {}
    for path, name in list_shards(run):
        ref = read_ref(run, path)
        groups = read_groups(run, ref, [g.group_id for g in ref.groups])
        for group in groups:
            key = name.attempt, group[0].group_id
            assert key not in found
            found[key] = group
    return found


def assert_unchanged(run: RunDir, before: dict[tuple[int, int], Group]) -> None:
    after = all_groups(run)
    assert after.keys() == before.keys()
    assert_same_groups(after.values(), [before[key] for key in after])
    assert verify_run(run) == []


def test_the_shards_of_each_engine_life_become_one_that_holds_the_same(run: RunDir) -> None:
    before = all_groups(run)
    audit = audit_run(run)
    assert compact_run(run) == Compaction(n_merged=7, n_made=2, n_left=0)
    assert_unchanged(run, before)
    assert [(n.attempt, n.sequence) for _, n in list_shards(run)] == [(0, 1), (1, 4)]
    assert len(list(run.episodes.glob("*.h5"))) == 2
    after = audit_run(run)
    assert (after.n_groups, after.n_trained) == (audit.n_groups, audit.n_trained)
    assert [n for n in after.notes if n not in audit.notes] == ["7 shards merged into larger ones"]


def test_compacting_again_does_nothing_and_later_steps_are_merged_too(run: RunDir) -> None:
    compact_run(run)
    assert compact_run(run) == Compaction(n_merged=0, n_made=0, n_left=2)
    begin_attempt(run, 2, 5)
    for step in (6, 7):
        take_step(run, step)
    mark_saved(run, 7)
    before = all_groups(run)
    assert compact_run(run) == Compaction(n_merged=2, n_made=1, n_left=2)
    assert_unchanged(run, before)


def test_a_merged_shard_that_is_merged_again_is_still_found(run: RunDir) -> None:
    before = all_groups(run)
    (run.checkpoint(5) / "COMPLETE").unlink()
    mark_saved(run, 2)
    compact_run(run)
    (run.checkpoint(5) / "COMPLETE").touch()
    assert compact_run(run).n_made == 2
    assert len(read_ledger(run).merged) == 2 + 4 + 2
    assert_unchanged(run, before)


def test_what_a_resume_may_still_train_on_is_left_alone(run: RunDir) -> None:
    for sequence, group in ((6, 10), (7, 11)):
        publish_ids(run, group, version=5, header=make_header(attempt=1, sequence=sequence))
    resume = partial(load_state, run, 5, strict=False, groups_per_step=2, max_staleness=0)
    before = resume()
    assert len(before.available) == 2
    assert compact_run(run).n_left == 2
    assert resume() == before


def test_large_shards_and_the_target_size_bound_what_is_merged(run: RunDir) -> None:
    size = max(name.size_bytes for _, name in list_shards(run))
    before = all_groups(run)
    assert compact_run(run, target_bytes=2 * size) == Compaction(n_merged=6, n_made=3, n_left=1)
    assert_unchanged(run, before)


def test_parts_that_only_some_shards_have_are_nan_elsewhere() -> None:
    parts = [
        layout.build_columns([_group_with(0, {"a": 1.0, "c": 3.0})]),
        layout.build_columns([_group_with(1, {"b": 2.0})]),
    ]
    joined = join_columns(parts)
    assert joined.part_names == ("a", "b", "c")
    rows = joined["episodes/reward_parts"][::2]
    np.testing.assert_array_equal(rows, [[1, np.nan, 3], [np.nan, 2, np.nan]])


def _group_with(group_id: int, parts: dict[str, float]) -> Group:
    return [dataclasses.replace(e, reward_parts=parts) for e in make_group(group_id)]


def test_what_reads_back_otherwise_is_not_put_in_place(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_groups(run)
    original = compact.join_columns

    def wrong(parts: list[layout.Columns]) -> layout.Columns:
        joined = original(parts)
        joined["episodes/advantage"][-1] += 1
        return joined

    monkeypatch.setattr(compact, "join_columns", wrong)
    with pytest.raises(ShardError, match=r"episodes/advantage of .* does not read back as it was"):
        compact_run(run)
    assert len(list(run.episodes.glob("*.h5"))) == 7
    assert_unchanged(run, before)


@pytest.mark.parametrize("instant", ["record", "rename", "first removal", "last removal"])
def test_a_compaction_cut_short_is_finished_by_the_next(
    run: RunDir, instant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_groups(run)
    n_removed = 0
    real_unlink = os.unlink

    def unlink(path: str | Path) -> None:
        nonlocal n_removed
        if str(path).endswith(".h5"):
            n_removed += 1
            if n_removed == {"first removal": 1, "last removal": 5}[instant]:
                raise KeyboardInterrupt
        real_unlink(path)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if instant == "record":
            patch.setattr(compact, "record_merged", killed)
        elif instant == "rename":
            patch.setattr("os.rename", killed)
        else:
            patch.setattr("os.unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            compact_run(run)
    assert_unchanged(run, before)
    assert compact_run(run).n_left == (1 if "removal" in instant else 0)
    assert_unchanged(run, before)
    assert len(list(run.episodes.glob("*.h5"))) == 2
    assert read_ledger(run).void == ()


def test_a_newer_minor_version_is_left_as_it_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_attempt(run, 2, 5)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "SCHEMA_VERSION", (1, 9))
        for step in (6, 7):
            take_step(run, step)
    mark_saved(run, 7)
    assert compact_run(run) == Compaction(n_merged=7, n_made=2, n_left=2)


def test_the_tables_of_an_analysis_stay_the_same(run: RunDir) -> None:
    pytest.importorskip("pandas")
    from slurm_grpo.analysis import open_run

    before = open_run(run.root)
    tables = before.episodes(), before.groups(), before.tokens(1_000_000)
    compact_run(run)
    after = open_run(run.root)
    for old, new in zip(
        tables, (after.episodes(), after.groups(), after.tokens(1_000_000)), strict=True
    ):
        by_id = [name for name in ("group_id", "episode_id", "attempt") if name in old]
        old, new = (t.sort_values(by_id, kind="stable", ignore_index=True) for t in (old, new))
        assert [name for name in old if not old[name].equals(new[name])] in ([], ["shard"])


def test_a_replay_finds_the_groups_where_they_are_now(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from slurm_grpo.trainer.replay import RecordedSteps

    before = all_groups(run)
    compact_run(run)
    other = make_books(tmp_path / "replayed")
    replayed = dataclasses.replace(Config(), run=RunConfig(replay_of=str(run.root)))
    freeze_config(
        dataclasses.replace(replayed, algorithm=AlgorithmConfig(groups_per_step=2)), other.config
    )
    steps = RecordedSteps(run, other, 0)
    for step in range(1, 6):
        ((first, ref), _) = steps.poll(step).groups
        assert first.group_id == 2 * step - 2
        attempt = int(step > 3)
        found = read_groups(other, ref, [first.group_id])
        assert_same_groups(found, [before[attempt, first.group_id]])
    assert verify_run(other) == []


def _hold(run: RunDir) -> None:
    RunLock(run).acquire()


def _lose(run: RunDir) -> None:
    (run.root / list_shards(run)[0][0]).unlink()


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (_hold, r"the run is live. .*another supervisor runs here"),
        (_lose, r"the audit has 2 finding\(s\), the first: step .* is missing.*episodes verify"),
    ],
)
def test_a_live_or_damaged_run_is_refused(
    run: RunDir, trouble: Callable[[RunDir], None], says: str
) -> None:
    trouble(run)
    names = sorted(os.listdir(run.episodes))
    with pytest.raises(ConfigError, match=says):
        compact_run(run)
    assert sorted(os.listdir(run.episodes)) == names


def test_the_command_says_what_it_did(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run_command(parser.parse_args([str(run.root)])) == ExitCode.OK
    assert "merged 7 shards into 2, 0 left as they were; 0.2 MiB before, 0." in (
        capsys.readouterr().out
    )
