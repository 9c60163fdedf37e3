"""Every path inside a run directory, in one place. Knows names, not contents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths under `<runs_dir>/<name>/`; see the README for the tree."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def jobs(self) -> Path:
        """One directory a submission to Slurm, numbered from 0, and a link to it named after its
        job id."""
        return self.root / "jobs"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def episodes(self) -> Path:
        return self.root / "episodes"

    @property
    def rescored(self) -> Path:
        """One directory per rescoring, with a file per shard."""
        return self.episodes / "rescored"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def hf_exports(self) -> Path:
        return self.checkpoints / "hf"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def wandb(self) -> Path:
        return self.root / "wandb"

    def attempt(self, attempt: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(attempt))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def hf_export(self, step: int) -> Path:
        return self.hf_exports / f"step_{step:06d}"

    def metrics_file(self, process: str) -> Path:
        """`process` is `trainer` or `generator-<engine>`: one writer per file."""
        return self.metrics / f"{process}.jsonl"

    def attempt_numbers(self) -> list[int]:
        """Attempts begun so far, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if re.fullmatch(r"\d+", p.name))

    def job_dirs(self) -> list[Path]:
        """Submissions so far, by number; not the links that are named after job ids."""
        found = [p for p in self.jobs.glob("*") if p.name.isdigit() and not p.is_symlink()]
        return sorted(found, key=lambda p: int(p.name))

    def create(self) -> None:
        """Make the fixed sub-directories; harmless when they exist."""
        for path in (self.attempts, self.episodes, self.manifests, self.checkpoints, self.metrics):
            path.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class AttemptDir:
    """Paths under `attempts/<n>/`, one life of the supervisor."""

    root: Path

    @property
    def resumed_from(self) -> Path:
        """Decimal step of the checkpoint this attempt starts from (0: the initial weights). Written
        by the trainer."""
        return self.root / "resumed_from"

    @property
    def record(self) -> Path:
        """What the supervisor of this attempt measured, JSON, renewed while it runs."""
        return self.root / "supervisor.json"

    @property
    def control(self) -> Path:
        """Address and keys of the control plane, JSON, mode 0600."""
        return self.root / "control.json"

    @property
    def versions(self) -> Path:
        return self.root / "versions.json"

    def log(self, process: str) -> Path:
        """One log per process, e.g. `supervisor`, `engine-0`, `trainer-1`."""
        return self.root / f"{process}.log"

    def exit_code(self, process: str) -> Path:
        return self.root / f"{process}.exit"
