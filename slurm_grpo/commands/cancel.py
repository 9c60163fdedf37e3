"""`slurm-grpo cancel RUN`: end a run for good, and return when it is gone.

A job is ended as a whole, also one that waits in the queue to continue; a run on this host by
SIGTERM to its supervisor, which ends its processes. What is on disk stays: `resume` continues.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress

from slurm_grpo.errors import ConfigError, DeadlineExceeded, ExitCode
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import RUN_HELP, Standing, find_run, live_supervisor_here, stand
from slurm_grpo.slurm.queue import cancel_jobs

_POLL_S = 1.0
_AGAIN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="wait so long (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    directory = find_run(arguments.run)
    standing = stand(directory)
    if standing.word == "unknown":
        raise ConfigError(f"{directory.root}: cannot tell what to cancel. {standing.detail}")
    if not standing.is_alive:
        detail = f" ({standing.detail})" if standing.detail else ""
        sys.stdout.write(f"{directory.root}: {standing.word}{detail}; nothing to cancel.\n")
        return ExitCode.OK
    started = time.monotonic()
    asked = -_AGAIN_S
    while standing.is_alive or live_supervisor_here(directory) is not None:
        waited = time.monotonic() - started
        if waited > arguments.timeout:
            who = ", ".join(standing.job_ids) or f"pid {live_supervisor_here(directory)}"
            raise DeadlineExceeded(
                f"{directory.root}: {standing.word} {waited:.0f} s after it was cancelled "
                f"({who}). Wait for it with `slurm-grpo status`, or ask the "
                "cluster's administrators when the job hangs in COMPLETING."
            )
        # Again and again: a job caught while it requeued itself comes back.
        if standing.word != "ending" and waited - asked >= _AGAIN_S:
            asked = waited
            _ask_to_end(directory, standing)
        time.sleep(_POLL_S)
        standing = stand(directory)
    sys.stdout.write(f"{directory.root}: cancelled.\n")
    return ExitCode.OK


def _ask_to_end(run: RunDir, standing: Standing) -> None:
    """Raises ConfigError when the run is neither a job nor on this host."""
    if standing.job_ids:
        cancel_jobs(standing.job_ids)
    elif (pid := live_supervisor_here(run)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    elif host := standing.record.get("host"):
        raise ConfigError(
            f"{run.root}: runs on {host}, which cannot be reached from here. Call this there, or "
            f"`kill {standing.record.get('pid')}`."
        )
