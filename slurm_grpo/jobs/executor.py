"""Submitit's executor, job and watcher, taught what they lack: heterogeneous jobs, clusters without
accounting, and jobs that are killed before they can say anything.

Used by `submission.py`. Promises that `job.result()` raises with the failing text, that it returns
once Slurm no longer runs the job, whatever ended it, and that a requeued job counts as running.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import SlurmUnavailable
from slurm_grpo.slurm.queue import ALIVE, job_states
from slurm_grpo.slurm.script import job_script, submitit_command
from slurm_grpo.slurm.submit_env import leftovers, parse_job_id, refusal

log = logging.getLogger(__name__)

_POLL_S = 30.0
_ENDING_S = 20.0
"""A job that has just left its result ends within this; until then Slurm is asked more often."""
_ENDING_POLL_S = 2.0


class QueueWatcher(SlurmInfoWatcher):
    """Asks `squeue`, then `sacct`: a heterogeneous job is its leader, since with the batch script
    all components end."""

    def update_if_long_enough(self, mode: str) -> None:
        age_s = time.time() - self._last_status_check
        if mode == "force" or (mode == "standard" and age_s >= _POLL_S):
            self.update()

    def update(self) -> None:
        self._last_status_check = time.time()
        try:
            states = job_states(sorted(self._registered - self._finished))
        except SlurmUnavailable as error:  # what is known stays known
            log.warning("asking again in %.0f s: %s", _POLL_S, error)
            return
        for job_id, components in states.items():
            leader = components[0]
            nodes = ",".join(c.nodes for c in components if c.nodes)
            info = {"State": leader.state, "Reason": leader.reason, "NodeList": nodes}
            self._info_dict[job_id] = info
            if not leader.is_alive:
                self._finished.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Also of a job that Slurm has forgotten; not of one it was never asked about."""
        info = self.get_info(job_id, mode=mode)
        return bool(info) and info["State"] not in ALIVE


class _Paths(JobPaths):
    @property
    def stdout(self) -> Path:
        return self.folder / "slurm.out"


class RunJob(SlurmJob[dict[str, Any]]):
    """One submission of a run."""

    _results_timeout_s = 5  # for a file system to show a result that the job has written
    watcher = QueueWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = _Paths(folder, job_id=job_id, task_id=self.task_id)
        self._last_forced = float("-inf")

    def done(self, force_check: bool = False) -> bool:
        """Whether Slurm runs it no longer. A result file alone says little: a job that requeues
        itself leaves one too."""
        try:
            age_s = time.time() - self.paths.result_pickle.stat().st_mtime
        except FileNotFoundError:
            age_s = float("inf")
        if age_s < _ENDING_S and time.monotonic() - self._last_forced >= _ENDING_POLL_S:
            force_check = True
        if force_check:
            self._last_forced = time.monotonic()
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")


class RunExecutor(SlurmExecutor):
    """Submits a run's supervisor; everything sbatch is told comes from the configuration.

    `folder` is the submission's directory, which holds the snapshot of the package that will run.
    """

    job_class = RunJob

    @classmethod
    def affinity(cls) -> int:
        return 2  # a login node with sbatch but without srun will do

    def __init__(self, folder: Path, cfg: Config) -> None:
        super().__init__(folder)
        self._cfg = cfg

    def submit_run(self, fn: Callable[[str], dict[str, Any]], run_dir: Path) -> RunJob:
        """Submit `fn(run_dir)`. Raises SubmissionRefused with sbatch's words."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # Submitit prints what it raises
                job = self.submit(fn, str(run_dir))
        except FailedJobError as error:
            raise refusal(str(error)) from None
        assert isinstance(job, RunJob)
        return job

    @property
    def _submitit_command_str(self) -> str:
        return submitit_command(self.folder)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return job_script(self._cfg, job_dir=self.folder, command=command)

    def _num_tasks(self) -> int:
        return 1  # the supervisor; it starts the others

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in leftovers(os.environ) for word in ("-u", name)]
        return ["env", *unset, "sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return parse_job_id(string.decode() if isinstance(string, bytes) else string)
