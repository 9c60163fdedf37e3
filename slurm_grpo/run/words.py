"""How people read a run's numbers on a terminal: labels, units, tables and a sparkline.

Shared by what the supervisor shows, by the commands and by the report.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_LABEL_WIDTH = 22
_SPARKS = "▁▂▃▄▅▆▇█"
PHASE_LABELS = {
    "wait": "waiting for episodes",
    "read": "reading shards",
    "forward_backward": "forward, backward",
    "optimizer": "optimizer",
    "sync": "sending weights",
    "pause": "engines paused",
}


def facts_table(title: str) -> Table:
    """For rows of a label and what there is to say."""
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(overflow="fold")
    return table


def print_paths(console: Console, paths: Mapping[str, str | None]) -> None:
    """Below a `facts_table`, which would cut long ones, the paths that there are."""
    for name, path in paths.items():
        if path is not None:
            line = f" [dim]{name:<{_LABEL_WIDTH + 2}}[/dim]{escape(path)}"
            console.print(line, highlight=False, soft_wrap=True)


def tokens_per_s(generated: float | None, trained: float | None) -> str:
    return f"{number(generated, 0)} generated   {number(trained, 0)} trained"


def reward_line(rewards: list[float], console: Console) -> Text:
    """The last reward, and all of them as a sparkline."""
    line = Text(f"{number(rewards[-1] if rewards else None)} ")
    line.append(sparkline(rewards, max(10, min(40, console.width - 46))), style="green")
    return line


def selected_reward(row: Mapping[str, float]) -> str:
    """Beside a step's reward: that of the groups it trained on, where it chose among them."""
    reward, selected = row.get("reward/mean"), row.get("selected/reward_mean")
    return "" if selected in (None, reward) else f" (selected {number(selected)})"


def sparkline(values: list[float], width: int) -> str:
    """`values` as bars of eight heights, squeezed to at most `width` columns."""
    if not values:
        return ""
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_SPARKS[round(7 * (m - low) / span) if span else 0] for m in means)


def before_after(points: Mapping[str, float | None]) -> str:
    """An evaluation's values around training."""
    before, after = points["before"], points["after"]
    if after is None:
        return f"{number(before)} before training"
    return f"{number(before)} → {number(after)}"


def number(value: float | None, digits: int = 3) -> str:
    """A value as people read it, `-` when there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(value: float | None) -> str:
    """Seconds as people read them, `-` when there are none."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def clock(seconds: float) -> str:
    """`4:05` or `1:04:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
