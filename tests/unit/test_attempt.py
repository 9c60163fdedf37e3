"""The lock on a run directory between two lives of one Slurm job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_grpo.errors import ConfigError, LockLost
from slurm_grpo.run.attempt import RunLock
from slurm_grpo.run.directory import RunDir


def test_a_restarted_job_takes_the_run_from_its_earlier_life_which_sees_so(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    earlier, later = RunLock(run, "7"), RunLock(run, "7")
    earlier.acquire()
    # Processes of one host differ by pid; the two lives of a job usually by host.
    later._mine = json.dumps({**json.loads(later._mine), "host": "another"})
    later.acquire()
    with pytest.raises(LockLost, match="started the job again"):
        earlier.check()
    earlier.release()
    later.check()


def test_another_job_is_refused(tmp_path: Path) -> None:
    RunLock(RunDir(tmp_path), "7").acquire()
    with pytest.raises(ConfigError, match="another supervisor runs here"):
        RunLock(RunDir(tmp_path), "8").acquire()


def test_a_lock_that_somebody_removed_is_lost(tmp_path: Path) -> None:
    lock = RunLock(RunDir(tmp_path))
    lock.acquire()
    (tmp_path / "supervisor.lock").unlink()
    with pytest.raises(LockLost, match="nobody"):
        lock.check()
