"""The trainer's rows while they are written, for whoever watches a run."""

from __future__ import annotations

from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import Row, parse_rows, valid_rows
from slurm_grpo.run.words import clock


class StepFeed:
    """The trainer's rows as they are written. Reads only what was added since the last look."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offset = 0
        self._all: list[Row] = []
        self.rows: list[Row] = []
        """Valid rows, sorted by step."""
        self.poll()

    def poll(self) -> bool:
        """Whether there is something new."""
        path = self._run.metrics_file("trainer")
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if not whole:
            return False
        self._offset += len(whole)
        self._all += parse_rows(whole.decode(errors="replace"))
        self.rows = valid_rows(self._all, read_resumed_from(self._run))
        return True

    @property
    def steps(self) -> list[Row]:
        """Rows of optimizer steps."""
        return [row for row in self.rows if "trainer/step_s" in row]

    @property
    def last(self) -> Row:
        """The row of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}

    @property
    def n_steps(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step that has one."""
        return [row["reward/mean"] for row in self.steps if row.get("reward/mean") is not None]

    def remaining_s(self, n_total: int) -> float | None:
        """Seconds the steps up to `n_total` will take at the pace of the last ten; None before the
        first."""
        recent = [row["trainer/step_s"] for row in self.steps[-10:]]
        return sum(recent) / len(recent) * (n_total - self.n_steps) if recent else None

    def eta(self, n_total: int) -> str:
        seconds = self.remaining_s(n_total)
        return "-" if seconds is None else clock(seconds)
