"""What a batch job runs: one attempt with steps in its allocation, then end, fail or come back.

Submitit calls `run_batch` for a single job; an array element runs this module, since it cannot wait
for Submitit's pickle. The supervisor's words go to the job's output. Knows nothing of how a run was
submitted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError, ExitCode, SlurmGrpoError
from slurm_grpo.jobs.requeue import (
    Act,
    next_act,
    requeue,
    wait_for_successor,
    why_told_to_end,
)
from slurm_grpo.jobs.srun_steps import SrunLauncher
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.run.summary import Summary, is_done, read_json
from slurm_grpo.slurm.allocation import Allocation, read_allocation
from slurm_grpo.supervisor.supervisor import supervise

_REQUEUED_S = 60.0
"""Longest wait for Slurm to end a process that asked to be requeued."""
_TEARDOWN_S = 20.0
"""Slurm's KillWait is 30 by default, and at the time limit the job has yet to be requeued."""
_COLUMNS = 120


class RunFailed(SlurmGrpoError):
    """The run is over without being finished; the text ends with what the failing role said."""


def run_batch(run_dir: str) -> Summary:
    """Run the next attempt in this job; the summary of a run that is finished or was stopped.

    A job that goes back into the queue does not return: Slurm ends the process. Raises
    SlurmGrpoError, with the end of the failing role's log, when the run failed or was cancelled.
    """
    run = RunDir(Path(run_dir))
    cfg = read_frozen(run.config)
    allocation = read_allocation()
    before = latest_complete(run) or 0
    try:
        launcher = SrunLauncher(cfg, allocation)
        outcome = supervise(run, cfg, launcher, console=Console(width=_COLUMNS))
    finally:
        tear_down(cfg)
    act, why = next_act(
        outcome,
        has_new_checkpoint=(latest_complete(run) or 0) > before,
        n_left=cfg.cluster.max_requeues - allocation.restart_count,
    )
    ended = (Ending.FINISHED, Ending.FAILED, Ending.REPLACED)
    if act is not Act.REQUEUE and outcome.ending not in ended:
        why += f"; `slurm-grpo resume {run.root}` continues"
    _say(f"job {allocation.reference}: {act.value}: {why}")
    if act is Act.REQUEUE:
        come_back(allocation, run)
    if outcome.ending is Ending.REPLACED:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wait_for_successor(allocation)
        sys.exit(outcome.exit_code)
    if act is Act.FAIL:
        text = f"{outcome.ending.value}, but {why}"
        error = RunFailed(text if outcome.error is None else outcome.explanation)
        error.exit_code = outcome.exit_code
        raise error
    return read_json(run.summary)


def run_element(sweep_dir: Path) -> Summary:
    """Run the sweep's element that this array task is. Raises ConfigError, and like `run_batch`."""
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    manifest = sweep_dir / "manifest.json"
    elements = {str(e["index"]): e for e in read_json(manifest)["elements"]}
    if index not in elements:
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID: {index} is no element of {manifest}; expected one of "
            f"{', '.join(elements)}. Submit the sweep's script with --array."
        )
    run = RunDir(sweep_dir / elements[index]["run_dir"])
    if is_done(run):  # whoever submits the script by hand asks for all elements again
        _say(f"element {index} is done already: {run.summary}")
        return read_json(run.summary)
    return run_batch(str(run.root))


def come_back(allocation: Allocation, run: RunDir) -> None:
    """Requeue this job and wait for the end that Slurm prepares; raises when none comes, or when
    the job was cancelled meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ending, why = why_told_to_end(allocation)
    if ending is Ending.CANCELLED:  # a requeue would undo that
        raise RunFailed(f"cancelled: {why}. `slurm-grpo resume {run.root}` continues.")
    complaint = requeue(allocation).strip()
    time.sleep(_REQUEUED_S)
    raise SlurmGrpoError(
        f"job {allocation.reference}: could not be requeued: {complaint or 'still running'}. Its "
        f"last checkpoint is whole; continue with `slurm-grpo resume {run.root}`."
    )


def tear_down(cfg: Config) -> None:
    """Run site.teardown, whatever comes of it."""
    if cfg.site.teardown:
        script = "\n".join(cfg.site.teardown)
        try:
            subprocess.run(["bash", "-c", script], check=True, timeout=_TEARDOWN_S)
        except subprocess.SubprocessError as error:
            _say(f"site.teardown: {error}")


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main() -> int:
    """`python -m slurm_grpo.jobs.batch --sweep SWEEP_DIR`, in an array task; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m slurm_grpo.jobs.batch")
    parser.add_argument("--sweep", type=Path, required=True, metavar="SWEEP_DIR")
    try:
        run_element(parser.parse_args().sweep)
    except SlurmGrpoError as error:
        _say(f"error: {error}")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
