"""Which checkpoints of a run are complete, and which one each attempt started from. No torch, so
that anybody may ask.

A checkpoint is written into `<name>.partial`, marked COMPLETE, then renamed; anything else was cut
short.
"""

from __future__ import annotations

import re
from pathlib import Path

from slurm_grpo.errors import ShardError
from slurm_grpo.fsio import read_whole
from slurm_grpo.run.directory import RunDir

COMPLETE = "COMPLETE"
"""File whose presence marks a checkpoint as whole; written last."""


def partial(path: Path) -> Path:
    """Where a checkpoint or export is assembled before it gets its name."""
    return path.with_name(path.name + ".partial")


def complete_steps(run: RunDir) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not run.checkpoints.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in run.checkpoints.iterdir()
        if (match := re.fullmatch(r"step_(\d+)", path.name)) and (path / COMPLETE).is_file()
    )


def latest_complete(run: RunDir) -> int | None:
    """Step of the newest complete checkpoint, None if there is none."""
    steps = complete_steps(run)
    return steps[-1] if steps else None


def read_resumed_from(run: RunDir) -> dict[int, int]:
    """The starting step of every attempt that got as far as writing it; others made nothing."""
    starts: dict[int, int] = {}
    for attempt in run.attempt_numbers():
        path = run.attempt(attempt).resumed_from
        if not path.exists():
            continue
        text = read_whole(path).decode(errors="replace").strip()
        if not re.fullmatch(r"\d+", text):
            raise ShardError(f"{path}: expected a step number, found {text[:40]!r}.")
        starts[attempt] = int(text)
    return starts
