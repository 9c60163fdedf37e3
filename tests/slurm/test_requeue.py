"""Coming back, on a real Slurm, without a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runs import ROOT, wait_until
from slurm_cluster import Cluster

pytestmark = pytest.mark.slurm

# A supervisor that has decided to requeue its job, and ignores SIGTERM until it does.
_PROGRAM = """
import os, pathlib, time
from slurm_grpo.jobs.batch import come_back
from slurm_grpo.run.directory import RunDir
from slurm_grpo.slurm.allocation import read_allocation
root = pathlib.Path(os.environ["ROOT"])
(root / f"life{os.environ.get('SLURM_RESTART_COUNT', '0')}").touch()
while not (root / "go").exists():
    time.sleep(0.05)
come_back(read_allocation(), RunDir(root))
"""


def test_a_job_cancelled_just_before_it_requeues_itself_stays_cancelled(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -p gen --requeue -o {tmp_path}/out --open-mode=append\n"
        f"export ROOT={tmp_path} PYTHONPATH={ROOT}\ntrap '' TERM\n"
        f"exec {sys.executable} {tmp_path}/program.py\n"
    )
    job = cluster.run("sbatch", "--parsable", script).strip()
    wait_until((tmp_path / "life0").exists, 120, "the job to start")
    cluster.run("scancel", job)
    out = tmp_path / "out"
    wait_until(lambda: "CANCELLED AT" in out.read_text(), 120, "SIGTERM")
    (tmp_path / "go").touch()
    (row,) = cluster.wait_state(job, ("CANCELLED", "PENDING", "RUNNING"))
    assert row.state == "CANCELLED"
    assert "RunFailed: cancelled: Slurm is ending the job" in out.read_text()
