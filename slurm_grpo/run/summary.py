"""The run in one page for programs: `summary.json`, written at every end of a run from what is on
disk.

The supervisor calls `write_summary`; the display and scripts read the result. It knows the
trainer's metric names, and nothing of how they were measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from slurm_grpo.config.schema import Config
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import Row, read_run_metrics

Status = Literal["done", "failed", "stopped", "interrupted"]
Summary = dict[str, Any]

PHASES = {
    "wait": "trainer/wait_for_groups_s",
    "read": "trainer/read_s",
    "forward_backward": "trainer/forward_backward_s",
    "optimizer": "trainer/optimizer_s",
    "sync": "trainer/sync_s",
    "pause": "generator/pause_s",
}
"""Phases of a step and the metric that holds their seconds. `pause` is the generator's, inside
`sync`."""


def write_summary(run: RunDir, cfg: Config, *, status: Status, error: str | None = None) -> Summary:
    """Build the summary and put it in place atomically; returns it."""
    summary = build_summary(run, cfg, status=status, error=error)
    write_durably(run.summary, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def build_summary(run: RunDir, cfg: Config, *, status: Status, error: str | None = None) -> Summary:
    """The summary of the run as it stands on disk, all attempts together."""
    rows = read_run_metrics(run, "trainer")
    steps = [row for row in rows if "trainer/step_s" in row]
    records = [read_json(run.attempt(n).record) for n in run.attempt_numbers()]
    versions = [read_json(run.attempt(n).versions) for n in run.attempt_numbers()]
    return {
        "status": status,
        "error": error,
        "seed": cfg.run.seed,
        "replay_of": cfg.run.replay_of,
        "steps": max((row["step"] for row in steps), default=0),
        "eval": evaluations(rows),
        "reward_first": _mean(steps[:5], "reward/mean"),
        "reward_last": _mean(steps[-5:], "reward/mean"),
        "selected_reward_first": _mean(steps[:5], "selected/reward_mean"),
        "selected_reward_last": _mean(steps[-5:], "selected/reward_mean"),
        "step_s_median": _median(steps, "trainer/step_s"),
        "phase_s_median": {phase: _median(steps, key) for phase, key in PHASES.items()},
        "peak_pss_bytes": max((r.get("peak_pss_bytes", 0) for r in records), default=0),
        "wall_s": round(sum(r.get("wall_s", 0.0) for r in records), 3),
        "n_attempts": len(records),
        "versions": next((v for v in reversed(versions) if v), {}),
    }


def evaluation_keys(rows: Sequence[Row]) -> dict[str, str]:
    """By evaluation set, the metric it is judged by: accuracy, or reward where the scorer calls
    nothing right or wrong."""
    keys: dict[str, str] = {}
    for key in sorted({key for row in rows for key in row if key.startswith("eval/")}):
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if metric == "accuracy" or (metric == "reward" and name not in keys):
            keys[name] = key
    return keys


def evaluations(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Of each evaluation set, its metric's value before the first step and after the last evaluated
    one."""
    found: dict[str, dict[str, Any]] = {}
    for name, key in evaluation_keys(rows).items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        found[name] = {
            "metric": key.rpartition("/")[2],
            "before": points[0][1] if points and points[0][0] == 0 else None,
            "after": points[-1][1] if points and points[-1][0] > 0 else None,
        }
    return found


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.fmean(values) if values else None


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty when it is not there or not whole."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


def is_done(run: RunDir) -> bool:
    """Whether the last attempt came to its end: evaluated and exported too, not just trained."""
    return bool(read_json(run.summary).get("status") == "done")
