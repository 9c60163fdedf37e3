"""What the doctor reads off Slurm's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_grpo.commands.doctor import _controller
from slurm_grpo.commands.main import main


def settings(**values: str) -> str:
    return "Configuration data as of today\n" + "".join(
        f"{key:<23} = {value}\n" for key, value in values.items()
    )


def test_only_backfill_starts_heterogeneous_jobs() -> None:
    good = settings(SLURM_VERSION="24.05.1", SchedulerType="sched/backfill", ClusterName="big")
    assert [finding.state for finding in _controller(good)] == ["pass", "pass"]
    version, scheduler = _controller(
        settings(SLURM_VERSION="19.05.2", SchedulerType="sched/builtin")
    )
    assert version.state == scheduler.state == "FAIL"
    assert "20.02" in version.text
    assert "cluster.allocation: split" in scheduler.text


def test_without_slurm_the_rest_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL         Slurm: scontrol: no such command here")
    assert lines[1].startswith("not checked")
