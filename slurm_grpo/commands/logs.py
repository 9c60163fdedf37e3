"""`slurm-grpo logs RUN`: print a process's log, or follow it, across requeues, to the run's end.

Reads files only; Slurm is asked no more than every half a minute, and only when the files say that
the attempt has ended.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from pathlib import Path

from slurm_grpo.errors import ConfigError, ExitCode
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import RUN_HELP, find_run, judge, stand

_POLL_S = 0.5
_LOOK_S = 2.0
_ASK_SLURM_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--role",
        choices=("supervisor", "trainer", "engine", "generator"),
        default="supervisor",
        help="whose log (generator and engine are the same; default: supervisor)",
    )
    parser.add_argument("--rank", type=int, default=0, help="which trainer rank or engine")
    parser.add_argument("--attempt", type=int, help="default: the last one")
    parser.add_argument("-n", "--lines", type=int, default=50, help="last lines shown first")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the run ends, across requeues"
    )


def run(arguments: argparse.Namespace) -> int:
    directory = find_run(arguments.run)
    role = "engine" if arguments.role == "generator" else arguments.role
    process = role if role == "supervisor" else f"{role}-{arguments.rank}"
    numbers = directory.attempt_numbers()
    if arguments.attempt is not None and arguments.attempt not in numbers:
        raise ConfigError(
            f"--attempt: there is no attempt {arguments.attempt} in {directory.root}; there are "
            f"{', '.join(map(str, numbers)) or 'none yet'}."
        )
    if arguments.follow:
        _follow(directory, process, arguments.attempt, arguments.lines)
        return ExitCode.OK
    if not numbers:
        state = stand(directory)
        raise ConfigError(
            f"{directory.root}: no attempt has begun, so there is no log ({state.word}"
            f"{': ' * bool(state.detail)}{state.detail}). --follow waits for it."
        )
    attempt = numbers[-1] if arguments.attempt is None else arguments.attempt
    path = _log_path(directory, attempt, process)
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.log"))
        raise ConfigError(
            f"{path}: no such log. Attempt {attempt} has {', '.join(known) or 'none yet'}."
        )
    _copy(path, _tail_offset(path, arguments.lines))
    return ExitCode.OK


def _follow(run: RunDir, process: str, only: int | None, n_lines: int) -> None:
    """Copy what is written to stdout, until the run has ended, or the attempt `only`."""
    has_ended = _EndWatch(run)
    attempt, offset = only, -1
    shown: Path | None = None
    while True:
        # Before the copy, so that what was written until then is shown.
        newest = max(run.attempt_numbers(), default=None)
        is_over = has_ended() or (only is not None and newest != only)
        if attempt is None:
            attempt = newest
        if attempt is not None and (path := _log_path(run, attempt, process)).is_file():
            if path != shown:
                shown, offset = path, offset if shown is None else 0
            offset = _copy(path, _tail_offset(path, n_lines) if offset < 0 else offset)
        if only is None and newest != attempt:
            attempt, offset = newest, 0
            _say(f"{run.root.name}: attempt {attempt}")
        elif is_over:
            _say(f"{run.root.name}: {judge(run, []).word}")
            return
        else:
            time.sleep(_POLL_S)


def _log_path(run: RunDir, attempt: int, process: str) -> Path:
    """A process's log, or that of its srun while the process has not begun one."""
    folder = run.attempt(attempt)
    role = process.partition("-")[0]
    paths = [folder.log(name) for name in (process, f"srun-{process}", f"srun-{role}s")]
    return next((path for path in paths if path.is_file() and path.stat().st_size), paths[0])


class _EndWatch:
    """Whether a run has ended; may be called all the time."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOOK_S
        by_files = judge(self._run, [])
        if by_files.is_alive:
            return False
        self._next = now + _ASK_SLURM_S
        return by_files.word == "done" or not stand(self._run).is_alive


def _tail_offset(path: Path, n_lines: int) -> int:
    """Where the last `n_lines` lines of a file begin."""
    with path.open("rb") as file:
        kept = deque(file, maxlen=max(0, n_lines))
        return file.tell() - sum(map(len, kept))


def _copy(path: Path, offset: int) -> int:
    """Write a file from `offset` on to stdout; where it ended."""
    with path.open("rb") as file:
        file.seek(offset)
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return file.tell()


def _say(text: str) -> None:
    """A line of our own between the log's, out of the way of a pipe."""
    sys.stdout.flush()
    sys.stderr.write(f"==> {text} <==\n")
