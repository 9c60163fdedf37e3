"""Metrics: one JSON-lines file per writing process, always; Weights & Biases when asked for.

A role makes a `MetricsWriter` and logs a row a step; everybody else reads files. Rows stay when a
resumed attempt rewinds: `read_run_metrics` leaves out the steps that were taken again. Knows no
metric by name.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_grpo.config.schema import Config
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.directory import RunDir

Row = dict[str, Any]


class MetricsWriter:
    """The one writer of a metrics file. Each row is on disk as a whole line when `log` returns."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._attempt = attempt
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # an earlier attempt was killed inside a line

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a row. `values` are numbers (numpy scalars too), texts or None; NaN and infinity
        become null."""
        row: Row = {"step": step, "attempt": self._attempt, "time_unix": round(time.time(), 3)}
        row.update((name, _plain(value)) for name, value in values.items())
        os.write(self._fd, (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[Row]:
    """Every whole row of a metrics file, in the order written; none if the file does not exist."""
    try:
        return parse_rows(path.read_text(errors="replace"))
    except FileNotFoundError:
        return []


def parse_rows(text: str) -> list[Row]:
    """The whole rows among the lines of `text`."""
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill
        if isinstance(row, dict) and {"step", "attempt"} <= row.keys():
            rows.append(row)
    return rows


def valid_rows(rows: Iterable[Row], resumed_from: Mapping[int, int]) -> list[Row]:
    """Rows of the run as it counts: not the steps that a later attempt went back over, sorted by
    step.

    `resumed_from` maps an attempt to the step it started from; a row of (attempt, step) is valid if
    its step is at most that of every later attempt.
    """
    kept = []
    for row in rows:
        bound = min(
            (k for attempt, k in resumed_from.items() if attempt > row["attempt"]),
            default=row["step"],
        )
        if row["step"] <= bound:
            kept.append(row)
    return sorted(kept, key=lambda row: (row["step"], row["attempt"]))


def read_run_metrics(run: RunDir, process: str) -> list[Row]:
    """The valid rows of one process of a run (`trainer`, `generator-0`)."""
    return valid_rows(read_metrics(run.metrics_file(process)), read_resumed_from(run))


class WandbLogger:
    """The same rows in Weights & Biases; every attempt continues the same wandb run. Used by
    trainer rank 0 only."""

    def __init__(self, cfg: Config, run: RunDir, attempt: int) -> None:
        """The run's files are under `run.wandb`, its id too. Raises what wandb.init raises."""
        import wandb  # slow to import, and needed here only

        run.wandb.mkdir(parents=True, exist_ok=True)
        id_file = run.wandb / "run_id"
        if not id_file.exists():
            write_durably(id_file, secrets.token_hex(4).encode())
        self._attempt = attempt
        self._run = wandb.init(
            project=cfg.wandb.project,
            name=run.root.name,
            id=id_file.read_text().strip(),
            resume="allow" if cfg.wandb.mode == "online" else None,
            mode=cfg.wandb.mode,
            dir=str(run.root),  # wandb appends `wandb/` itself
            config=asdict(cfg),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
            ),
        )
        # A resumed attempt repeats steps, and wandb's own step counter refuses to go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a row; the same arguments as `MetricsWriter.log`."""
        row = {"step": step, "attempt": self._attempt}
        self._run.log(row | {name: _plain(value) for name, value in values.items()})

    def close(self) -> None:
        """Flush and end; the wandb service ends with it."""
        self._run.finish()
