"""What the doctor reads off Slurm's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_grpo.commands.doctor import _controller, _partitions
from slurm_grpo.commands.main import main
from slurm_grpo.config.schema import ClusterConfig, Config
from slurm_grpo.errors import SlurmUnavailable


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


def test_a_sites_notice_is_no_answer() -> None:
    cfg = Config(cluster=ClusterConfig(kind="slurm", allocation="split"))
    notice = "** Maintenance on Monday **\n"
    [finding] = _partitions(cfg, notice + "gpu*|up|1-00:00:00|4|gpu:2\n" + notice)
    assert (finding.state, finding.text[:9]) == ("pass", "gpu is up")
    with pytest.raises(SlurmUnavailable, match="cannot be asked: sinfo"):
        list(_partitions(cfg, notice))
    with pytest.raises(SlurmUnavailable, match="cannot be asked: scontrol"):
        list(_controller(notice))
