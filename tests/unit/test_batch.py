"""What a job of a sweep does before it starts anything; whole jobs are in tests/slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_grpo.config.schema import Config, SiteConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.jobs import batch
from slurm_grpo.jobs.batch import run_element
from slurm_grpo.run.directory import RunDir


def make_sweep(folder: Path) -> RunDir:
    run = RunDir(folder / "s-0")
    run.create()
    elements = [{"index": 0, "run_dir": "s-0", "changes": {}}]
    (folder / "manifest.json").write_text(json.dumps({"elements": elements}))
    return run


def test_an_element_that_is_done_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_sweep(tmp_path)
    run.summary.write_text(json.dumps({"status": "done", "steps": 3}))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert run_element(tmp_path)["steps"] == 3
    assert run.attempt_numbers() == []


def test_a_task_that_is_no_element_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    with pytest.raises(ConfigError, match=r"SLURM_ARRAY_TASK_ID: 7 is no element .*one of 0\."):
        run_element(tmp_path)


def test_a_teardown_that_hangs_or_fails_keeps_no_job_from_coming_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "_TEARDOWN_S", 0.1)
    batch.tear_down(Config(site=SiteConfig(teardown=("exec sleep 60",))))
    assert "timed out" in capsys.readouterr().out
    monkeypatch.undo()
    batch.tear_down(Config(site=SiteConfig(teardown=("exit 3",))))
    assert "non-zero exit status 3" in capsys.readouterr().out
