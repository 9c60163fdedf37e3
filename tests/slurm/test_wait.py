"""`launch/submit.py --wait` on real runs: it shows them, and ends with their result."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import UncompletedJobError

import runs
import slurm_runs
from slurm_cluster import Cluster
from slurm_grpo.errors import ExitCode
from slurm_grpo.jobs.executor import RunJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ModelDir = Callable[[], Path]


def wait(cluster: Cluster, config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(runs.ROOT / "launch/submit.py"), str(config), "--wait", *overrides],
        env={**cluster.env, "PYTHONPATH": str(runs.TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_finished_run_ends_the_wait_with_success(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    config = slurm_runs.write_config(
        tmp_path, tiny_model_dir(), {"run": {"steps": 2}}, slurm_runs.SPLIT
    )
    done = wait(cluster, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    assert "the run is finished" in done.stdout


def test_a_failed_run_ends_the_wait_with_what_its_role_said(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "task": {"scorer": {"name": "reward_functions:always_raises", "max_errors": 2}},
    }
    config = slurm_runs.write_config(tmp_path, tiny_model_dir(), changes)
    done = wait(cluster, config)
    assert done.returncode == ExitCode.SCORER
    words = done.stderr.splitlines()
    assert re.match(
        r"error: job \d+: failed: engine-0 ended on gen1: exit code 4, too many", words[0]
    )
    assert words[2].startswith("Traceback (most recent call last)")
    assert "RuntimeError: this scorer is broken" in words[-1]

    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    jobs = tmp_path / "runs/test/jobs"
    job = RunJob(jobs / "0", (jobs / "0/job_id").read_text().strip())
    with pytest.raises(UncompletedJobError, match="this scorer is broken"):
        job.result()
    assert job.state == "FAILED"
