"""Pictures of a run, drawn from its metrics files. Needs matplotlib, which only this file
imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_grpo.metrics import Row, read_run_metrics
from slurm_grpo.rundir import RunDir
from slurm_grpo.summary import evaluation_keys

_REWARD, _EVAL = "#2a78d6", "#c2571a"


def plot_reward(run: RunDir, path: Path) -> None:
    """Write a PNG of training reward and held-out accuracy (or reward) over steps.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_run_metrics(run, "trainer")
    steps, rewards = _series(rows, "reward/mean")
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, color=_REWARD, alpha=0.35, linewidth=1, label="training reward")
    axes.plot(steps, _smooth(rewards), color=_REWARD, linewidth=2, label="its mean of 5 steps")
    for name, key in evaluation_keys(rows).items():
        at, values = _series(rows, key)
        label = f"{name.replace('_', '-')} {key.rpartition('/')[2]} (greedy)"
        axes.plot(at, values, "o--", color=_EVAL, linewidth=1.2, label=label)
        for x, y in zip(at, values, strict=True):
            axes.annotate(
                f"{y:.2f}",
                (x, y),
                textcoords="offset points",
                xytext=(0, 8),
                ha="center",
                color=_EVAL,
            )
    axes.set_xlabel("step")
    axes.set_title(run.root.name, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
    return list(points), list(points.values())


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of the last `width` values (of fewer at the beginning)."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
