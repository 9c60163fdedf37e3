"""`slurm-grpo episodes summary RUN`: a run's episodes by policy version and by task.

Reads small columns and, for the rate of unique answers, texts shard by shard. Prints what counts of
the run: not what a later attempt went back over.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from slurm_grpo.analysis.frame import RunData, open_run
from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.analysis.terminal import add_run, say, table, warn_of_damage, width
from slurm_grpo.errors import ExitCode

MAX_ROWS = 20
"""More policy versions are joined, several to a row."""
LEGEND = """\
reward    mean of the episodes that scored, as are its parts, the last columns
length    completion tokens; cut: share of episodes that the length limit ended
zero      share of prompts whose rewards are all equal: they teach nothing
stale     steps that the oldest token lagged behind when it was trained on
unique    distinct answers per episode of a prompt; 1: all differ
mismatch  trainer against generator on the same tokens (k3, nats); 0: none"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--score", metavar="NAME", help="rewards of this rescoring instead")


def run(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    say(summary_text(opened, max_rows=MAX_ROWS, max_width=width(), score=arguments.score))
    warn_of_damage(opened)
    return ExitCode.OK


def summary_text(run: RunData, *, max_rows: int, max_width: int, score: str | None = None) -> str:
    """The whole report as text, with the rewards of the rescoring `score` if one is named."""
    facts = Facts(run, score)
    episodes, groups = facts.episodes, facts.groups
    n_trained = int(episodes["step"].notna().sum())
    lines = [
        f"{run.name}: {len(episodes):,} episodes of {len(groups):,} prompts in "
        f"{len(run.index.shards):,} shards",
        f"{n_trained:,} of them trained on in {len(run.index.manifests):,} steps",
    ]
    n_superseded = sum(
        int(np.diff(shard.episode_offsets)[shard.superseded].sum()) for shard in run.index.shards
    )
    if n_superseded:
        lines.append(f"{n_superseded:,} more, which a later attempt made again, are left out")
    if run.index.n_gone:
        lines.append(f"{run.index.n_gone:,} more prompts were trained on; their episodes are gone")
    if len(episodes):
        first = episodes["version"].min()
        size = math.ceil((int(episodes["version"].max() - first) + 1) / max_rows)
        for of in (episodes, groups):
            of["versions"] = (of["version"] - first) // size * size + first
        by_version = facts.summarize("versions")
        by_version.index = [_version(int(v), size) for v in by_version.index]
        by_task = facts.summarize("task").drop(columns="mismatch")
        by_task = by_task.set_index(by_task.index.astype(str)).sort_index()
        hidden = ["prompts", "errors"]
        parts = facts.columns.parts
        if len(parts) == 1 and episodes["reward"].equals(episodes[next(iter(parts.values()))]):
            hidden += parts.values()  # the part is the reward
        names = {column: name for name, column in parts.items()}
        for label, frame in (("version", by_version), ("task", by_task)):
            lines += ["", _text(frame.drop(columns=hidden), label, names, max_width)]
        lines += ["", LEGEND]
    return "\n".join(lines)


def _version(first: int, size: int) -> str:
    if size == 1:
        return "none" if first < 0 else str(first)
    return f"{first}-{first + size - 1}"


def _text(frame: pd.DataFrame, label: str, names: Mapping[str, str], max_width: int) -> str:
    """`names` of columns where they differ: a part may be called like another column."""
    formats = {"episodes": ",.0f", "length": ",.1f", "cut": ".0%", "zero": ".0%", "stale": ".2f"}
    formats |= {"unique": ".2f", "mismatch": ".1e"}

    def cell(column: str, value: float) -> str:
        return "-" if pd.isna(value) else format(value, formats.get(column, ".3f"))

    columns = [[cell(column, v) for v in frame[column]] for column in frame]
    header = [label, *(names.get(column, column) for column in frame)]
    rows = list(zip(map(str, frame.index), *columns, strict=True))
    return table(header, rows, max_width)
