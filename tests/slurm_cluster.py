"""A real Slurm for tests: `slurm/cluster.sh` with what tests ask it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parent / "slurm" / "cluster.sh"
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")


class Component(NamedTuple):
    """A row of squeue; `job` is `J`, `J+1` in a heterogeneous job, `J_2` in an array."""

    job: str
    state: str
    nodes: str
    reason: str


class Cluster:
    """A running cluster. `env` is the environment to submit and ask with."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self.env = dict(env)

    def run(self, *argv: str | Path, timeout_s: float = 60.0) -> str:
        """Standard output of a command; fails with its standard error."""
        done = subprocess.run(
            [str(word) for word in argv],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{argv}: exit code {done.returncode}\n{done.stderr}"
        return done.stdout

    def squeue(self, job: str | int | None = None) -> list[Component]:
        """One row a component, finished ones too; of one job or of all."""
        which = [] if job is None else ["-j", str(job)]
        text = self.run("squeue", "-h", "-t", "all", "-o", "%i|%T|%N|%r", *which)
        return sorted(Component(*line.split("|", 3)) for line in text.splitlines())

    def live_jobs(self) -> list[Component]:
        return [row for row in self.squeue() if row.state in LIVE]

    def wait_state(
        self, job: str | int, states: str | Collection[str], timeout_s: float = 120.0
    ) -> list[Component]:
        """Rows of the job once every component is in one of `states`."""
        wanted = {states} if isinstance(states, str) else set(states)
        rows: list[Component] = []

        def is_there() -> bool:
            rows[:] = self.squeue(job)
            return bool(rows) and {row.state for row in rows} <= wanted

        self._wait(lambda: f"job {job} to be {sorted(wanted)}: {rows}", is_there, timeout_s)
        return rows

    def kill_node(self, node: str) -> None:
        """SIGKILL the node's slurmd; tasks on it live on."""
        self.run("bash", SCRIPT, "kill-node", node, self.directory)

    def start_node(self, node: str) -> None:
        """Start the node's slurmd and wait until Slurm uses it again."""
        self.run("bash", SCRIPT, "start-node", node, self.directory)

        def is_up() -> bool:
            state = self.run("sinfo", "-h", "-n", node, "-p", "all", "-o", "%T").strip()
            return state in ("idle", "mixed", "allocated")

        self._wait(lambda: f"node {node} to be up", is_up, 120.0)

    def processes(self, variable: str | None = None) -> list[str]:
        """`pid command` of processes of jobs; with `NAME=VALUE`, those with it in their
        environment. Roles have no SLURM_JOB_ID but SLURM_GRPO_RUN_DIR."""
        chosen = [] if variable is None else [variable]
        return self.run("bash", SCRIPT, "processes", self.directory, *chosen).splitlines()

    def cancel_all(self, timeout_s: float = 120.0) -> None:
        """Cancel what is left in the queue and wait until it is gone."""

        def is_empty() -> bool:
            # Again and again: a job caught while it requeued itself comes back.
            self.run("scancel", "--user", "root")
            return not self.live_jobs()

        self._wait(lambda: f"{self.live_jobs()} to end", is_empty, timeout_s)

    def check_nothing_survives(self, timeout_s: float = 30.0) -> None:
        """Fail if processes of ended jobs are alive."""
        self._wait(
            lambda: f"processes of ended jobs to end: {self.processes()}",
            lambda: not self.processes(),
            timeout_s,
        )

    def _wait(self, what: Callable[[], str], is_done: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < end, f"waited {timeout_s:.0f} s for {what()}"
            time.sleep(0.2)


def why_not(*, accounting: bool = False) -> str:
    """What keeps this machine from running a cluster; empty if nothing does."""
    checked = subprocess.run(
        ["bash", str(SCRIPT), "check"],
        env={**os.environ, "ACCOUNTING": "1" if accounting else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return checked.stderr.strip() if checked.returncode else ""


@contextmanager
def running_cluster(*, proctrack: str = "", accounting: bool = False) -> Iterator[Cluster]:
    """A cluster of its own; it ends with the block, or with this process should that be killed."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    settings = {"PROCTRACK": proctrack, "ACCOUNTING": "1" if accounting else ""}
    started = subprocess.run(
        ["bash", str(SCRIPT), "start", str(directory)],
        env={**os.environ, **settings, "OWNER": str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        assert started.returncode == 0, f"the cluster does not start:\n{started.stderr}"
        prefixes = ("SLURM_", "SBATCH_", "SRUN_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        yield Cluster(directory, {**env, "SLURM_CONF": str(directory / "slurm.conf")})
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(directory)], timeout=120, check=True)
