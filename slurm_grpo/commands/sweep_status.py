"""`slurm-grpo sweep status SWEEP_DIR`: what every element of a sweep is doing."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slurm_grpo.errors import ExitCode
from slurm_grpo.run.state import Standing, stand_all, tally
from slurm_grpo.run.step_feed import StepFeed
from slurm_grpo.run.words import clock, number, sparkline
from slurm_grpo.sweeps.directory import Element, compress, find_sweep, short_names

_SPARK_COLUMNS = 10
_STYLES = {"done": "green", "running": "cyan", "failed": "red", "died": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", help="directory that launch/sweep.py has made, or its name")


def run(arguments: argparse.Namespace) -> int:
    rows = find_sweep(arguments.sweep)
    standings = stand_all([row.run for row in rows])
    names = short_names([key for row in rows for key in row.changes])
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("#", *names.values()):
        table.add_column(header, justify="right", overflow="fold")
    table.add_column("state", no_wrap=True)
    for header in ("step", "reward", "ETA"):
        table.add_column(header, justify="right", no_wrap=True)
    for row, standing in zip(rows, standings, strict=True):
        table.add_row(*_cells(row, standing, list(names)))
    console = Console()
    console.print(table)
    console.print(Text(tally(standings), style="bold"))
    reasons: dict[str, list[int]] = {}
    for row, standing in zip(rows, standings, strict=True):
        if standing.detail and not standing.is_alive and standing.word != "done":
            reasons.setdefault(standing.detail.splitlines()[0], []).append(row.index)
    for reason, indices in reasons.items():
        line = f"{compress(indices)}: {reason}"
        console.print(line, style="yellow", markup=False, highlight=False)
    return ExitCode.OK


def _cells(row: Element, standing: Standing, keys: list[str]) -> list[str | Text]:
    feed = StepFeed(row.run)
    n_total = row.config.run.steps
    rewards = feed.rewards
    seconds = feed.remaining_s(n_total) if standing.is_alive else None
    state = standing.word
    if standing.job_ids:
        state += f" {standing.job_ids[0]}"
    reward = Text(f"{sparkline(rewards, _SPARK_COLUMNS)} ", style="green")
    reward.append(number(rewards[-1] if rewards else None), style="default")
    return [
        str(row.index),
        *(row.changes.get(key, "") for key in keys),
        Text(state, style=_STYLES.get(standing.word, "")),
        f"{feed.n_steps}/{n_total}",
        reward,
        "" if seconds is None else clock(seconds),
    ]
