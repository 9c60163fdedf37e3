"""Pictures of a run: how a chart is drawn and how it becomes part of a page.

Needs matplotlib, which is imported when something is drawn. `inline_svg` leaves colours to the
page's style sheet, as `var(--c1)`, so that one picture serves light and dark. Knows steps and
values, not what a run is; only `plot_reward` reads one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import Row, read_run_metrics
from slurm_grpo.run.summary import evaluation_keys
from slurm_grpo.run.words import selected_reward

_REWARD, _EVAL = "#2a78d6", "#c2571a"
SERIES = tuple(f"#0d0a{i:02x}" for i in range(1, 7))
"""Colours of series: `--c1` to `--c6` of the page."""
INK, FAINT = "#0d0b01", "#0d0b02"
"""Axes and texts, and what should stand back: `--ink` and `--faint` of the page."""
HEAT = tuple(f"#0d0c{i:02x}" for i in range(9))
"""From low to high: `--h0` to `--h8` of the page."""
_VARIABLES = {
    **{colour: f"--c{i}" for i, colour in enumerate(SERIES, 1)},
    **{colour: f"--h{i}" for i, colour in enumerate(HEAT)},
    INK: "--ink",
    FAINT: "--faint",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.formatter.limits": (-3, 4),
}
MAX_POINTS = 400
"""More points than a chart is wide are averaged."""

Points = tuple[Sequence[float], Sequence[float]]
"""Steps, and the value at each."""


def line_chart(title: str, lines: Mapping[str, Points], *, log: bool = False) -> str:
    """Lines over steps as inline SVG."""

    def draw(axes: Any) -> None:
        for (name, points), colour in zip(lines.items(), SERIES * len(lines), strict=False):
            x, y = thinned(points)
            style = "o" if len(x) == 1 else "-"
            axes.plot(x, y, style, color=colour, linewidth=1.4, markersize=4, label=name)
        if log:
            axes.set_yscale("log")

    return _svg(title, draw, legend=len(lines) > 1)


def trend_chart(title: str, name: str, points: Points, others: Mapping[str, Points]) -> str:
    """A noisy line with its mean of 5 steps, and sparse `others` as labelled points."""

    def draw(axes: Any) -> None:
        draw_trend(axes, points, name, SERIES[0])
        for (other, sparse), colour in zip(others.items(), SERIES[1:] * len(others), strict=False):
            draw_labelled(axes, sparse, other, colour)

    return _svg(title, draw, legend=True)


def band_chart(title: str, low: Points, middle: Points, high: Points, name: str) -> str:
    """A line with a band around it, such as a median between two quantiles."""

    def draw(axes: Any) -> None:
        (x, bottom), (_, y), (_, top) = thinned(low), thinned(middle), thinned(high)
        style = "o-" if len(x) == 1 else "-"
        axes.fill_between(x, bottom, top, color=SERIES[0], alpha=0.25, linewidth=0)
        axes.plot(x, y, style, color=SERIES[0], linewidth=1.6, markersize=4, label=name)
        axes.set_ylim(bottom=0)

    return _svg(title, draw, legend=True)


def histogram(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> str:
    """Shares of each sample in common bins, as outlines with a light fill."""
    import numpy as np

    def draw(axes: Any) -> None:
        joined = np.concatenate([np.asarray(values, float) for values in samples.values()])
        bins: Any = np.histogram_bin_edges(joined, bins=24)
        if (joined == np.round(joined)).all():  # bins around whole numbers, equally many in each
            low, high = joined.min(), max(joined.max(), joined.min() + 4)
            width = max(1, -(-int(high - low + 1) // 24))
            bins = np.arange(low, high + width + 1, width) - 0.5
        for (name, values), colour in zip(samples.items(), SERIES, strict=False):
            counts, _ = np.histogram(values, bins)
            share = counts / max(1, counts.sum())
            axes.stairs(share, bins, color=colour, alpha=0.18, fill=True)
            axes.stairs(share, bins, color=colour, linewidth=1.4, label=name)
        axes.set_ylabel("share")

    return _svg(title, draw, legend=len(samples) > 1, xlabel=xlabel)


def stacked_chart(title: str, ylabel: str, steps: Sequence[float], parts: Mapping[str, Any]) -> str:
    """What each part contributes in every step, one on the other, as bars."""
    import numpy as np

    def draw(axes: Any) -> None:
        bottom: Any = 0.0
        for (name, values), colour in zip(parts.items(), SERIES, strict=False):
            x, y = thinned((steps, values), 60)
            width = 0.85 * (np.diff(x).min() if len(x) > 1 else 1)
            axes.bar(x, y, width, bottom, color=colour, label=name, linewidth=0)
            bottom = bottom + np.asarray(y)
        axes.set_ylabel(ylabel)

    return _svg(title, draw, legend=True)


def heat_map(title: str, steps: Sequence[float], rows: Mapping[str, Sequence[float]]) -> str:
    """One row per name, from its own lowest to its own highest value; the range is its label."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    def draw(axes: Any) -> None:
        labels, levels = [], []
        for name, values in rows.items():
            x, y = thinned((steps, values), 60)
            low, high = np.nanmin(y), np.nanmax(y)
            labels.append(f"{name}\n{low:.3g} … {high:.3g}")
            levels.append((np.asarray(y) - low) / (high - low) if high > low else np.zeros(len(y)))
        half = (x[1] - x[0]) / 2 if len(x) > 1 else 0.5
        edges = [v - half for v in x] + [x[-1] + half]
        axes.pcolormesh(
            edges,
            np.arange(len(rows) + 1),
            np.array(levels),
            cmap=ListedColormap(HEAT),
            vmin=0,
            vmax=1,
        )
        axes.set_yticks(np.arange(len(rows)) + 0.5, labels)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)

    height = 1.1 + 0.32 * len(rows)
    return _svg(title, draw, legend=False, grid=False, height=height)


def _svg(
    title: str,
    draw: Callable[[Any], None],
    *,
    legend: bool,
    xlabel: str = "step",
    height: float = 2.7,
    grid: bool = True,
) -> str:
    """What `draw` puts on the axes, in the page's style, with what every chart has."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(4.7, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes: Any = figure.subplots()
        axes.patch.set_alpha(0.0)
        draw(axes)
        axes.set_xlabel(xlabel)
        low, high = axes.dataLim.intervalx
        if high - low < 1:  # a single step
            axes.set_xlim(low - 1, high + 1)
        if tuple(axes.dataLim.intervaly) == (0, 0):
            axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
        if grid:
            axes.grid(axis="y", alpha=0.35, linewidth=0.6)
            axes.set_axisbelow(True)
        if legend:
            labels = axes.get_legend_handles_labels()[1]
            # What fits a line of the figure's width, as a rule of thumb.
            ncols = max(1, min(len(labels), 62 // (max(map(len, labels)) + 6)))
            figure.legend(loc="outside upper left", ncols=ncols, handlelength=1.4)
        return inline_svg(figure, title)


def inline_svg(figure: Any, label: str) -> str:
    """A figure as an `<svg>` element that scales and takes its colours from the page."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"#0d0[abc]\w\w", lambda m: f"var({_VARIABLES[m[0]]})", text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    head = f'<svg {size[0]} role="img" aria-label="{escape(label)}" class="chart">'
    text = head + text[text.index(">") + 1 :]
    # Names are unique in a figure only, and a page holds many.
    prefix = re.sub(r"\W+", "-", label)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    return re.sub(r"\n\s*", "\n", text)


def thinned(points: Points, most: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """The points, or means over equally many of them, NaN apart, if there are more than `most`."""
    import numpy as np

    x, y = (np.asarray(values, float) for values in points)
    size = -(-len(x) // most) if len(x) else 1
    if size == 1:
        return x.tolist(), y.tolist()
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    known = np.add.reduceat(~np.isnan(y), starts, dtype=float)
    sums = np.add.reduceat(np.nan_to_num(y), starts)
    means = np.divide(sums, known, out=np.full(len(starts), np.nan), where=known > 0)
    return (np.add.reduceat(x, starts) / counts).tolist(), means.tolist()


def draw_trend(axes: Any, points: Points, name: str, colour: str) -> None:
    """A noisy line, pale, and its mean of 5 steps."""
    style = "o-" if len(points[0]) == 1 else "-"
    axes.plot(*thinned(points), style, color=colour, alpha=0.35, linewidth=1, label=name)
    means = thinned((points[0], smooth(points[1])))
    axes.plot(*means, color=colour, linewidth=2, label="its mean of 5 steps")


def draw_labelled(axes: Any, points: Points, name: str, colour: str) -> None:
    """Sparse points with their values beside them."""
    steps, values = points
    axes.plot(steps, values, "o--", color=colour, linewidth=1.2, label=name)
    for x, y in zip(steps, values, strict=True):
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            color=colour,
        )


def plot_reward(run: RunDir, path: Path) -> None:
    """Write a PNG of training reward and held-out accuracy (or reward) over steps.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_run_metrics(run, "trainer")
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_trend(axes, series(rows, "reward/mean"), "training reward", _REWARD)
    if any(selected_reward(row) for row in rows):
        steps, rewards = series(rows, "selected/reward_mean")
        label = "its mean over the groups that were trained on"
        axes.plot(steps, smooth(rewards), color=_REWARD, linewidth=1, linestyle=":", label=label)
    for name, key in evaluation_keys(rows).items():
        label = f"{name.replace('_', '-')} {key.rpartition('/')[2]} (greedy)"
        draw_labelled(axes, series(rows, key), label, _EVAL)
    axes.set_xlabel("step")
    axes.set_title(run.root.name, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the rows that lack it."""
    points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
    return list(points), list(points.values())


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of the last `width` values (of fewer at the beginning)."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
