"""`slurm-grpo sweep table SWEEP_DIR`: the varied keys and final metrics of every element, best
first."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from slurm_grpo.config.values import nearest
from slurm_grpo.errors import ConfigError, ExitCode
from slurm_grpo.run.state import Standing, stand_all
from slurm_grpo.run.summary import build_summary
from slurm_grpo.run.words import clock, number
from slurm_grpo.sweeps.directory import Element, find_sweep, short_names

Cells = dict[str, Any]
_SHOWN = ("steps", "reward_last", "step_s_median", "wall_s")
_TITLES = {
    "index": "#",
    "status": "state",
    "eval.before": "before",
    "eval.after": "after",
    "reward_last": "reward",
    "step_s_median": "s/step",
    "wall_s": "wall",
}
_EVAL = "eval.after"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", help="directory that launch/sweep.py has made, or its name")
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help=f"largest first; any column of --csv (default: {_EVAL}, or reward_last without)",
    )
    parser.add_argument("--csv", action="store_true", help="every column, as CSV, to stdout")


def run(arguments: argparse.Namespace) -> int:
    rows = find_sweep(arguments.sweep)
    standings = stand_all([row.run for row in rows])
    table = [_cells(row, standing) for row, standing in zip(rows, standings, strict=True)]
    columns = list(dict.fromkeys(name for cells in table for name in cells))
    names = short_names([key for row in rows for key in row.changes])
    column = _sort_column(arguments.sort, columns, names)
    present = [cells for cells in table if cells.get(column) is not None]
    absent = [cells for cells in table if cells.get(column) is None]
    present.sort(key=lambda cells: _sortable(cells[column]), reverse=True)
    table = present + absent
    if arguments.csv:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        return ExitCode.OK
    evals = [name for name in columns if name.startswith("eval.")]
    shown = ["index", *names, "status", *(c for c in (*evals, *_SHOWN) if c in columns)]
    Console().print(_render(table, shown, names, column))
    return ExitCode.OK


def _cells(row: Element, standing: Standing) -> Cells:
    """One element by column: its place, what was varied, and its summary as of now, flattened."""
    cells: Cells = {"index": row.index, "run": row.run.root.name, **row.changes}
    cells["status"] = standing.word  # not the summary's: it may run, or have died without one
    summary = build_summary(row.run, row.config, status="stopped")
    evaluations = summary["eval"]
    for name, points in evaluations.items():
        stem = "eval" if len(evaluations) == 1 else f"eval.{name}"
        cells |= {f"{stem}.before": points["before"], f"{stem}.after": points["after"]}
    numbers = {k: v for k, v in summary.items() if v is None or isinstance(v, int | float)}
    return cells | {k: v for k, v in numbers.items() if k != "error"}


def _sort_column(asked: str | None, columns: Sequence[str], names: dict[str, str]) -> str:
    if asked is None:
        return _EVAL if _EVAL in columns else "reward_last"
    full = {short: key for key, short in names.items()}.get(asked, asked)
    if full not in columns:
        raise ConfigError(f"--sort: no column {asked}. {nearest(asked, columns)}")
    return full


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Numbers, also those written as text, by value; other texts after them."""
    try:
        return True, float(value), ""
    except (TypeError, ValueError):
        return False, 0.0, str(value)


def _render(table: Sequence[Cells], shown: Sequence[str], names: dict[str, str], by: str) -> Table:
    rendered = Table(box=None, pad_edge=False, header_style="dim")
    for name in shown:
        rendered.add_column(
            _TITLES.get(name) or names.get(name, name),
            justify="left" if name == "status" else "right",
            style="bold" if name == by else "",
            no_wrap=name not in names,
            overflow="fold",
        )
    for cells in table:
        rendered.add_row(*(_text(name, cells.get(name)) for name in shown))
    return rendered


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "wall_s":
        return clock(value)
    return (
        number(value, 1 if name == "step_s_median" else 3)
        if isinstance(value, float)
        else str(value)
    )
