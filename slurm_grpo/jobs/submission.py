"""Submitting a run: `<run>/jobs/<n>/` with a snapshot of the package, Submitit's files and the
batch script; then, if asked, waiting for its end.

Called by the launcher and by whatever continues runs. Promises that what is edited after
submission does not change a queued run, and that a refused submission leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import UncompletedJobError

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError, ExitCode, JobFailed
from slurm_grpo.fsio import storage_errors, write_durably
from slurm_grpo.jobs.batch import RunFailed, run_batch
from slurm_grpo.jobs.executor import RunExecutor, RunJob
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import stand
from slurm_grpo.run.summary import read_json
from slurm_grpo.run.versions import PACKAGE_ROOT, VERSION_FILE, code_version
from slurm_grpo.slurm.script import CODE, job_script, submitit_command
from slurm_grpo.slurm.submit_env import require_sbatch, run_sbatch

_LAUNCHER = "launch/submit.py"
"""Goes along: what a run prints at its end names the launcher beside the package."""
_LOOK_S = 1.0
_SUBMITTING_S = 150.0
"""A submission that has no job id by then has died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job in the queue."""

    job: RunJob
    job_dir: Path


def script_of_next(run: RunDir, cfg: Config) -> str:
    """The exact script that `submit_run` would submit; makes nothing."""
    job_dir = run.jobs / str(_next_number(run))
    command = submitit_command(job_dir)
    return job_script(cfg, job_dir=job_dir, command=command)


def expected_start(run: RunDir, cfg: Config) -> str:
    """What `sbatch --test-only` says about it."""
    return run_sbatch(["--test-only"], script=script_of_next(run, cfg))


def refuse_live_job(run: RunDir) -> None:
    """Raise ConfigError, naming it, if a job of the run is queued or running."""
    standing = stand(run)
    if standing.is_alive:
        jobs = ", ".join(standing.job_ids) or "a supervisor elsewhere"
        raise ConfigError(
            f"{run.root}: a live run has this directory ({jobs}, {standing.word}), and it can have "
            f"only one. Wait for it, end it with `slurm-grpo cancel {run.root}`, or start under "
            "another --run.name."
        )


def submit_run(run: RunDir, cfg: Config) -> Submission:
    """Put the run, whose configuration is frozen, into the queue.

    Raises SubmissionRefused or SlurmUnavailable; then there is no trace of the attempt.
    """
    require_sbatch()
    with _new_job_dir(run) as job_dir:
        snapshot_package(job_dir / CODE)
        job = RunExecutor(job_dir, cfg).submit_run(run_batch, run.root)
    write_durably(job_dir / "job_id", f"{job.job_id}\n".encode())
    (job_dir / "batch.sh").symlink_to(job.paths.submission_file.name)
    with contextlib.suppress(FileExistsError):  # the number of an earlier submission
        (run.jobs / job.job_id).symlink_to(job_dir.name)
    return Submission(job=job, job_dir=job_dir)


def snapshot_package(code_dir: Path) -> None:
    """Copy the package as it is now into `code_dir`, which goes on a job's PYTHONPATH."""
    with storage_errors("copy the package into", code_dir):
        shutil.copytree(
            PACKAGE_ROOT / "slurm_grpo",
            code_dir / "slurm_grpo",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        (code_dir / VERSION_FILE).write_text(code_version())
        if (script := PACKAGE_ROOT / _LAUNCHER).is_file():
            (code_dir / _LAUNCHER).parent.mkdir()
            shutil.copy(script, code_dir / _LAUNCHER)


def wait_for_end(submission: Submission) -> int:
    """Print what the job's supervisor prints until the job has ended, over requeues; the exit code.

    Raises JobFailed with the failing text and the run's own exit code.
    """
    job, log = submission.job, submission.job_dir / "slurm.out"
    position, said = 0, ""
    is_over = False
    while not is_over:
        is_over = job.done()
        info = job.get_info(mode="cache")
        words = " ".join(
            info[key] for key in ("State", "Reason") if info.get(key, "None") != "None"
        )
        if words != said:
            said = words
            sys.stdout.write(f"job {job.job_id}: {said}\n")
        with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as lines:
            lines.seek(position)
            shutil.copyfileobj(lines, sys.stdout)
            position = lines.tell()
            sys.stdout.flush()
        if not is_over:
            time.sleep(_LOOK_S)
    try:
        summary = job.result()
    except UncompletedJobError as error:
        # Submitit shows its own frames around what the run said.
        text = str(error).rpartition(f"{RunFailed.__module__}.{RunFailed.__name__}: ")[2]
        words = text.partition(f"\n{22 * '-'}\nYou can check")[0].strip()
        failure = JobFailed(f"job {job.job_id}: {words}")
        failure.exit_code = _exit_code(RunDir(submission.job_dir.parents[1]), job.job_id)
        raise failure from None
    return ExitCode.OK if summary["status"] == "done" else ExitCode.STOPPED


def _exit_code(run: RunDir, job_id: str) -> int:
    """What the run's last attempt ended with, if it was this job's and could still say so."""
    numbers = run.attempt_numbers()
    record = read_json(run.attempt(numbers[-1]).record) if numbers else {}
    mine = str(record.get("job_id")) == job_id
    return (int(record.get("exit_code", 0)) if mine else 0) or ExitCode.FAILURE


def _next_number(run: RunDir) -> int:
    number = max((int(p.name) for p in run.job_dirs()), default=-1) + 1
    while (run.jobs / str(number)).is_symlink():  # a job's id
        number += 1
    return number


@contextlib.contextmanager
def _new_job_dir(run: RunDir) -> Iterator[Path]:
    """`jobs/<n>`, claimed by mkdir; gone again if the block fails.

    Raises ConfigError when somebody else submits, or has just submitted, the same run.
    """
    with storage_errors("make", run.jobs):
        run.jobs.mkdir(parents=True, exist_ok=True)
    number = _next_number(run)
    job_dir = run.jobs / str(number)
    try:
        job_dir.mkdir()
    except FileExistsError:
        raise _being_submitted(run) from None
    try:
        _refuse_others(run, number)
        yield job_dir
    except Exception:
        shutil.rmtree(job_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            run.jobs.rmdir()
        raise


def _refuse_others(run: RunDir, number: int) -> None:
    earlier = [p for p in run.job_dirs() if int(p.name) < number]
    if any(_is_being_made(path) for path in earlier):
        raise _being_submitted(run)
    if earlier:
        refuse_live_job(run)


def _is_being_made(job_dir: Path) -> bool:
    try:
        age_s = time.time() - job_dir.stat().st_mtime
    except FileNotFoundError:  # refused since it was listed
        return False
    return age_s < _SUBMITTING_S and not (job_dir / "job_id").exists()


def _being_submitted(run: RunDir) -> ConfigError:
    return ConfigError(
        f"{run.root}: another submission of this run is being made at this moment. Wait for it, or "
        "choose another --run.name."
    )
