"""`slurm-grpo episodes summary RUN`: a run's episodes by policy version and by task.

Reads small columns and, for the rate of unique answers, texts shard by shard. Prints what counts of
the run: not what a later attempt went back over.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import pandas as pd

from slurm_grpo.analysis.columns import PART
from slurm_grpo.analysis.frame import RunData, open_run
from slurm_grpo.analysis.rescored import reward_columns
from slurm_grpo.analysis.terminal import add_run, say, table, warn_of_damage, width
from slurm_grpo.errors import ExitCode

MISMATCH = "trainer/mismatch_k3_nats"
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
    episodes = _episodes(run, score)
    names = ["group_id", "task", "policy_version_min", "zero_spread", "n_unique_answers"]
    groups = run.groups([*names, "n_episodes"])
    if score is not None:
        spread = episodes.groupby("group_id")["reward"].nunique()
        groups["zero_spread"] = groups["group_id"].map(spread <= 1)
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
        first = episodes["policy_version_min"].min()
        n_versions = int(episodes["policy_version_min"].max() - first) + 1
        size = math.ceil(n_versions / max_rows)
        for frame in (episodes, groups):
            frame["version"] = (frame["policy_version_min"] - first) // size * size + first
        by_version = summarize(episodes, groups, "version")
        by_version.index = [_version(int(v), size) for v in by_version.index]
        by_task = summarize(episodes, groups, "task").drop(columns="mismatch")
        by_task = by_task.set_index(by_task.index.astype(str)).sort_index()
        for name, frame in (("version", by_version), ("task", by_task)):
            lines += ["", _text(frame, name, max_width)]
        lines += ["", LEGEND]
    return "\n".join(lines)


def summarize(episodes: pd.DataFrame, groups: pd.DataFrame, by: str) -> pd.DataFrame:
    """One row per value of the column `by`, which both tables have."""
    parts = [name for name in episodes.columns if name.startswith(PART)]
    of = episodes.groupby(by, observed=True)
    prompts = groups.groupby(by, observed=True)
    return pd.DataFrame(
        {
            "episodes": of.size(),
            "reward": of["reward"].mean(),
            "length": of["n_tokens"].mean(),
            "cut": of["is_cut"].mean(),
            "zero": prompts["zero_spread"].mean(),
            "stale": of["staleness"].mean().astype("f8"),
            "unique": prompts["n_unique_answers"].sum() / prompts["n_episodes"].sum(),
            "mismatch": of["mismatch"].mean(),
            **{name.removeprefix(PART): of[name].mean() for name in parts},
        }
    )


def _episodes(run: RunData, score: str | None) -> pd.DataFrame:
    """What `summarize` needs of the episodes."""
    names = ["task", "group_id", "policy_version_min", "step", "staleness", "n_tokens"]
    own = reward_columns(run.episode_columns(), score)
    columns = [*names, "finish_reason", own.reward, own.error, *own.parts.values()]
    to_name = {column: PART + name for name, column in own.parts.items()} | {own.reward: "reward"}
    episodes = run.episodes(columns).rename(columns=to_name)
    parts = [PART + name for name in own.parts]
    episodes["is_cut"] = episodes.pop("finish_reason") == "length"
    episodes.loc[episodes.pop(own.error).notna(), ["reward", *parts]] = np.nan
    if len(parts) == 1 and episodes["reward"].equals(episodes[parts[0]]):
        del episodes[parts[0]]  # the part is the reward
    steps = run.steps()
    by_step = dict(zip(steps["step"], steps[MISMATCH], strict=True)) if MISMATCH in steps else {}
    episodes["mismatch"] = episodes["step"].map(by_step).astype("f8")
    return episodes


def _version(first: int, size: int) -> str:
    if size == 1:
        return "none" if first < 0 else str(first)
    return f"{first}-{first + size - 1}"


def _text(frame: pd.DataFrame, name: str, max_width: int) -> str:
    formats = {"episodes": ",.0f", "length": ",.1f", "cut": ".0%", "zero": ".0%", "stale": ".2f"}
    formats |= {"unique": ".2f", "mismatch": ".1e"}

    def cell(column: str, value: float) -> str:
        return "-" if pd.isna(value) else format(value, formats.get(column, ".3f"))

    columns = {column: [cell(column, v) for v in frame[column]] for column in frame}
    labels = [str(label) for label in frame.index]
    rows = list(zip(labels, *columns.values(), strict=True))
    return table([name, *columns], rows, max_width)
