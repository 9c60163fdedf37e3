"""Episodes for other tools: Parquet, CSV, JSON lines."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from sample_episodes import begin_attempt, make_group, make_header, make_run, train_step
from slurm_grpo.analysis import open_run
from slurm_grpo.analysis.export import JsonLines
from slurm_grpo.commands import main as cli
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.shards import publish_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The first shard alone has no error and lacks a reward part; the second alone is trained."""
    run = make_run(tmp_path / "test")
    begin_attempt(run, 0, 0)
    failed = make_group(1, n_tokens=4)
    failed[0] = replace(failed[0], error="boom", reward=0.0)
    failed[1] = replace(failed[1], reward_parts={"correct": 1.0, "format": 0.5})
    publish_groups(run, [make_group(0)], make_header())
    train_step(run, 1, publish_groups(run, [failed], make_header(sequence=1)))
    return run


def export(run: RunDir, out: Path, *arguments: str) -> int:
    return cli.main(["episodes", "export", str(run.root), str(out), *arguments])


def test_each_format_gives_the_same_table(run: RunDir, tmp_path: Path) -> None:
    readers = {
        "parquet": pd.read_parquet,
        "csv": pd.read_csv,
        "jsonl": lambda path: pd.read_json(path, lines=True),
    }
    expected = open_run(run.root).episodes()
    for suffix, read in readers.items():
        out = tmp_path / f"out.{suffix}"
        assert export(run, out) == 0
        table = read(out)
        assert list(table.columns) == list(expected.columns)
        for name in ("episode_id", "completion_text", "reward", "finish_reason", "n_tokens"):
            assert list(table[name]) == list(expected[name]), (suffix, name)
        assert list(table["step"].isna()) == [True, True, False, False]
        assert list(table["error"].fillna("")) == ["", "", "boom", ""]
        assert list(table["part_format"].isna()) == [True, True, True, False]
        assert not list(tmp_path.glob("*.partial"))


def test_tokens_are_lists_of_exactly_what_was_sampled(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert export(run, out, "--tokens", "--columns", "episode_id", "--where", "n_tokens == 4") == 0
    table = pd.read_parquet(out)
    for row, episode in zip(table.itertuples(), make_group(1, n_tokens=4), strict=True):
        assert np.array_equal(row.token_id, episode.completion.token_ids)
        assert np.array_equal(row.logprob, episode.completion.logprobs)
        assert row.logprob.dtype == np.float32
        assert list(row.policy_version) == [0] * 4
    lines = tmp_path / "out.jsonl"
    assert export(run, lines, "--tokens", "--columns", "episode_id") == 0
    first = json.loads(lines.read_text().splitlines()[0])
    assert first["token_id"] == make_group(0)[0].completion.token_ids.tolist()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("out.xlsx", [], "expected one of .parquet, .csv, .jsonl"),
        ("out.csv", ["--tokens"], "CSV has no lists"),
        ("out.csv", ["--columns", "rewrad"], "Did you mean reward?"),
        ("out.csv", ["--where", "reward > 9"], "no episode to write"),
        ("missing/out.csv", [], "missing/out.csv"),
        ("full.jsonl", [], "free space"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_no_file(
    run: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "full.jsonl":
        refusal = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(JsonLines, "write_table", Mock(side_effect=refusal))
    assert export(run, tmp_path / name, *arguments) != 0
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["test"]
