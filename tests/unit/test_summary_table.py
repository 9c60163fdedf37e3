"""The summary of a run's episodes: right figures, in 80 columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sample_episodes import begin_attempt, make_group, make_header, make_run, train_step
from slurm_grpo.analysis import open_run
from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.analysis.summary_table import summary_text
from slurm_grpo.commands import main as cli
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.staging.shards import publish_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Step 1: two groups of version 0, one without spread; step 2: one of version 0, stale."""
    run = make_run(tmp_path / "test")
    begin_attempt(run, 0, 0)
    flat = [replace(e, reward=1.0) for e in make_group(1)]
    flat[1] = replace(flat[1], error="boom", reward=0.0)
    first = publish_groups(run, [make_group(0, n_tokens=5), flat], make_header())
    second = publish_groups(run, [make_group(2)], make_header(sequence=1))
    publish_groups(run, [make_group(3, oldest_version=7)], make_header(sequence=2))
    train_step(run, 1, first)
    train_step(run, 2, second)
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    writer.log(1, {"trainer/mismatch_k3_nats": 0.5})
    writer.log(2, {"trainer/mismatch_k3_nats": 0.2})
    writer.close()
    return run


def rows(text: str, name: str) -> dict[str, dict[str, str]]:
    """The block of `text` whose first column is `name`, by its first cell."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
    block = lines[start : lines.index("", start)]
    header, *body = (line.split() for line in block)
    return {cells[0]: dict(zip(header, cells, strict=True)) for cells in body}


def test_parts_may_be_called_like_other_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "test")
    begin_attempt(run, 0, 0)
    parts = {"length": 0.25, "task": 0.5, "prompts": 0.75}
    group = [replace(e, reward_parts=parts) for e in make_group(0, n_tokens=4)]
    publish_groups(run, [group], make_header())
    text = summary_text(open_run(run.root), max_rows=20, max_width=200)
    lines = [line.split() for line in text.split("\n")]
    start = next(i for i, line in enumerate(lines) if line[:1] == ["task"])
    shown = list(zip(lines[start], lines[start + 1], strict=True))
    assert {("length", "4.0"), ("length", "0.250"), ("task", "0.500"), ("prompts", "0.750")} <= {
        *shown
    }
    assert Facts(open_run(run.root)).tasks["length"].tolist() == [4.0]


def test_versions_and_tasks_are_summed_up(run: RunDir) -> None:
    text = summary_text(open_run(run.root), max_rows=20, max_width=100)
    assert "8 episodes of 4 prompts in 3 shards" in text
    assert "6 of them trained on in 2 steps" in text
    by_version = rows(text, "version")
    assert by_version["0"] == {
        "version": "0",
        "episodes": "6",
        "reward": "0.600",  # 0, 1; 1, failed; 0, 1: over the five that scored
        "length": "3.7",
        "cut": "0%",
        "zero": "33%",
        "stale": "0.33",
        "unique": "1.00",
        "mismatch": "4.0e-01",
        "correct": "0.400",
    }
    assert by_version["7"]["stale"] == by_version["7"]["mismatch"] == "-"
    assert rows(text, "task")["addition"]["episodes"] == "8"


def test_many_versions_are_joined(run: RunDir) -> None:
    by_version = rows(summary_text(open_run(run.root), max_rows=2, max_width=100), "version")
    assert {name: row["episodes"] for name, row in by_version.items()} == {"0-3": "6", "4-7": "2"}


def test_no_line_is_wider_than_the_terminal(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["episodes", "summary", str(run.root)]) == 0
    out = capsys.readouterr().out.split("\n\n")
    tables = [block for block in out if block.lstrip().startswith(("version", "task"))]
    assert len(tables) == 4
    assert max(len(line) for block in tables for line in block.split("\n")) <= 60


def test_what_is_left_out_is_said(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    begin_attempt(run, 1, 1)
    next(iter(run.episodes.glob("v000000-*s000000*"))).write_bytes(b"")
    assert cli.main(["episodes", "summary", str(run.root)]) == 0
    shown = capsys.readouterr()
    assert "2 more, which a later attempt made again, are left out" in shown.out
    assert "2 more prompts were trained on; their episodes are gone" in shown.out
    assert "1 file(s)" in shown.err


def test_a_run_without_episodes_has_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["episodes", "summary", str(make_run(tmp_path).root)]) == 0
    assert "0 episodes" in capsys.readouterr().out


def test_a_run_goes_by_its_name_too(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.root.parent / "runs").mkdir()
    run.config.write_text("run: {seed: 1}\n")
    run.root.rename(run.root.parent / "runs" / "named")
    monkeypatch.chdir(run.root.parent)
    assert cli.main(["episodes", "summary", "named"]) == 0
    assert "named: 8 episodes" in capsys.readouterr().out
    assert cli.main(["episodes", "summary", "nemad"]) == 2
    assert "Did you mean runs/named?" in capsys.readouterr().err
