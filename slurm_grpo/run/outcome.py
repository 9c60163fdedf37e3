"""How an attempt ends, and the words for it.

The supervisor makes an `Outcome` from exit codes and signals; a batch job decides by its `ending`
whether to come back (`slurm/requeue.py`). Pure but for reading the end of a log.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from slurm_grpo.errors import ExitCode
from slurm_grpo.run.summary import Status

_TAIL_LINES = 60
_MEANINGS = {
    ExitCode.OK: "by itself",
    ExitCode.FAILURE: "an unexpected exception",
    ExitCode.CONFIG: "the configuration cannot be used",
    ExitCode.NON_FINITE: "a loss or gradient is not finite",
    ExitCode.SCORER: "too many scorer errors",
    ExitCode.INFRASTRUCTURE: "a deadline passed or the file system refused",
    ExitCode.STOPPED: "told to stop",
}
FATAL_CODES = (ExitCode.CONFIG, ExitCode.NON_FINITE, ExitCode.SCORER)
"""Another try would end the same way."""


class Ending(Enum):
    """Why an attempt is over."""

    FINISHED = "finished"
    BOUNDARY = "stopped at a step boundary"
    """With a checkpoint, because time is short or Slurm wants the nodes."""
    FAILED = "failed"
    SIGNALLED = "told to end"
    """By a person, as far as anybody knows."""
    CANCELLED = "cancelled"
    TIME_LIMIT = "out of time"
    REPLACED = "replaced"
    """Slurm took this attempt for dead, and a newer one has the run directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ends."""

    ending: Ending
    exit_code: int
    error: str | None = None
    log: Path | None = None
    """The log whose end explains a failure."""

    @property
    def status(self) -> Status:
        if self.ending is Ending.FINISHED:
            return "done"
        if self.ending is Ending.BOUNDARY:
            return "stopped"
        return "failed" if self.ending is Ending.FAILED else "interrupted"

    @property
    def explanation(self) -> str:
        """The error and what the failed process said last."""
        text = f"{self.status}: {self.error}"
        if self.log is None:
            return text
        return f"{text}\nThe end of {self.log}:\n{last_words(self.log)}"


def failure(error: str, code: int, log: Path | None) -> Outcome:
    """A failed attempt, with the exit code that says whether another try may help."""
    known = code in _MEANINGS and code not in (ExitCode.OK, ExitCode.STOPPED)
    exit_code = code if known else ExitCode.INFRASTRUCTURE if code < 0 else ExitCode.FAILURE
    return Outcome(ending=Ending.FAILED, exit_code=exit_code, error=error, log=log)


def describe(code: int) -> str:
    if code < 0:
        names = {int(s): s.name for s in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"exit code {code}, {_MEANINGS.get(code, 'unknown')}"


def first_to_blame(codes: Mapping[str, int]) -> str:
    """Of trainer ranks that were seen dead together, the one whose exit names a cause.

    When one rank dies, the others soon fail in a collective, as infrastructure errors or plain
    exceptions.
    """

    def suspicion(code: int) -> int:
        if code < 0 or code in FATAL_CODES:
            return 0
        return 2 if code in (ExitCode.INFRASTRUCTURE, ExitCode.OK) else 1

    return min(codes, key=lambda peer: (suspicion(codes[peer]), peer))


def last_words(path: Path) -> str:
    """The last traceback in a log, or its last lines if there is none."""
    try:
        lines = path.read_text(errors="replace").rstrip().splitlines()
    except FileNotFoundError:
        return "(there is no such file)"
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    start = starts[-1] if starts else len(lines) - _TAIL_LINES // 3
    return "\n".join(lines[max(start, len(lines) - _TAIL_LINES, 0) :])
