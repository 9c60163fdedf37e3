"""Whole runs on the test cluster: a config for it, submission as a user does it, and the wait for
what comes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import runs
from slurm_cluster import Cluster
from slurm_grpo.run import proctree
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.directory import RunDir

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

HET = {"generators": {"partition": "gen"}, "trainers": {"partition": "train"}}
SPLIT = {"allocation": "split", "shared": {"partition": "all"}}
_COMMON: dict[str, Any] = {
    "cluster": {
        "kind": "slurm",
        "time_limit": "30",
        "signal_s": 60,
    },
    "site": {"interface": "lo"},  # all nodes are this machine
}


class SlurmRun:
    """A submitted run."""

    def __init__(self, cluster: Cluster, run: RunDir) -> None:
        self.cluster = cluster
        self.run = run
        self.job = (run.root / "jobs" / "0" / "job_id").read_text().strip()

    @property
    def output(self) -> str:
        """What the supervisor printed, over all lives of the job."""
        path = self.run.root / "jobs" / "0" / "slurm.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def explain(self) -> str:
        found = [f"{self.cluster.squeue(self.job)}\n{self.output[-4000:]}"]
        for path in sorted(self.run.attempts.glob("*/*.log")):
            found.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(found)

    def wait_end(self, timeout_s: float = 400.0) -> list[str]:
        """Until every component has ended: their states, in Slurm's words."""
        try:
            return [row.state for row in self.cluster.wait_state(self.job, ENDED, timeout_s)]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None

    def wait_step(self, step: int, timeout_s: float = 400.0, *, attempt: int = 0) -> None:
        """Until `attempt` has trained `step`."""

        def reached() -> bool:
            states = {row.state for row in self.cluster.squeue(self.job)}
            rows = [row for row in runs.step_rows(self.run) if row["attempt"] == attempt]
            is_there = any(row["step"] >= step for row in rows)
            assert is_there or not states & set(ENDED), self.explain()
            return is_there

        self._wait(reached, timeout_s, f"step {step}")

    def wait_checkpoint(self, step: int, timeout_s: float = 400.0) -> None:
        self._wait(
            lambda: (latest_complete(self.run) or 0) >= step, timeout_s, f"checkpoint {step}"
        )

    def wait_attempt(self, number: int, timeout_s: float = 240.0) -> None:
        """Until the job has come back from the queue for its attempt `number`."""
        self._wait(lambda: number in self.run.attempt_numbers(), timeout_s, f"attempt {number}")

    def wait_continued(self, attempt: int) -> int:
        """Until `attempt` has trained a step: the one it continued after."""
        self.wait_step(1, attempt=attempt)
        return int(self.run.attempt(attempt).resumed_from.read_text())

    def record(self, attempt: int = -1) -> dict[str, Any]:
        numbers = self.run.attempt_numbers()
        path = self.run.attempt(numbers[attempt]).root / "supervisor.json"
        return dict(json.loads(path.read_text()))

    def supervisor(self) -> int:
        """Pid of the supervisor at work."""
        return int(self.record()["pid"])

    def role(self, peer: str) -> int:
        """Pid of a role process, on whatever node of this machine."""
        for line in self.cluster.processes(f"SLURM_GRPO_PEER={peer}"):
            pid, words = line.split(maxsplit=1)
            if str(self.run.root) in _environment(int(pid)) and ".role" in words:
                return int(pid)
        raise AssertionError(f"no process is {peer}: {self.cluster.processes()}")

    def processes(self) -> list[str]:
        """Processes of this run, wherever they are."""
        return self.cluster.processes(f"SLURM_GRPO_RUN_DIR={self.run.root}")

    def wait_gone(self) -> None:
        """Until no process of this run, which has ended, is left."""
        self._wait(lambda: not self.processes(), 30, "no process of the run")

    def usr1(self) -> None:
        """What Slurm sends `cluster.signal_s` before the time limit."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", self.job)

    def _wait(self, condition: Any, timeout_s: float, what: str) -> None:
        try:
            runs.wait_until(condition, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None


def write_config(
    folder: Path,
    model: Path,
    changes: dict[str, Any] | None = None,
    allocation: dict[str, Any] = HET,
) -> Path:
    """Like `runs.write_config`, for the test cluster."""
    base = runs.merge(_COMMON, {"cluster": allocation})
    return runs.write_config(folder, model, runs.merge(base, changes or {}))


def submit(cluster: Cluster, config: Path, *overrides: str) -> SlurmRun:
    """`python launch/submit.py CONFIG` on the cluster's login node, which is here."""
    done = subprocess.run(
        [sys.executable, str(runs.ROOT / "launch" / "submit.py"), str(config), *overrides],
        env={**cluster.env, "PYTHONPATH": str(runs.TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return SlurmRun(cluster, RunDir(config.parent / "runs" / "test"))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    return proctree.start_ticks(pid) is not None


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
