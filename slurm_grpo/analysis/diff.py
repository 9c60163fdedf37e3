"""`slurm-grpo episodes diff RUN_A RUN_B`: do two runs hold the same; where do they first differ.

Compares what a repeated run must repeat: which groups each step trained on, and of every episode
tokens, log-probabilities, versions, rewards and advantages, and each step's loss. Not times, names
or attempts. Exact: a number that differs in its last bit differs.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from slurm_grpo.analysis.columns import OpenShard
from slurm_grpo.analysis.frame import RunData, open_run
from slurm_grpo.analysis.terminal import add_run, say, table, warn_of_damage, width
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.state import run_path
from slurm_grpo.staging.layout import Array

TOKENS = {"tokens": "token_id", "log-probs": "logprob", "versions": "policy_version"}
VALUES = {"rewards": "reward", "advantages": "advantage", "texts": "completion_text"}
LOSS = "trainer/loss"
MOST_TOKENS = 1000
"""Episodes whose tokens are read to find the largest difference of a log-probability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One line of the comparison."""

    what: str
    n_compared: int
    n_different: int
    first: str = ""
    largest: float = math.nan
    """Largest absolute difference, where that has a meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("other", type=run_path, metavar="RUN_B", help="the run to compare it with")


def run(arguments: argparse.Namespace) -> int:
    a, b = open_run(arguments.run), open_run(arguments.other)
    found = compare(a, b)
    say(f"A: {a.run.root}\nB: {b.run.root}\n")
    rows = []
    for d in found:
        largest = "" if np.isnan(d.largest) else f"{d.largest:.3g}"
        rows.append([d.what, f"{d.n_compared:,}", f"{d.n_different:,}", largest])
    say(table(["", "compared", "different", "by at most"], rows, width()) + "\n")
    different = [d for d in found if d.n_different]
    for d in different:
        text = f"{d.what} first differ: {d.first}"
        say(textwrap.fill(text, width(), subsequent_indent="  "))
    say("The runs differ." if different else "The runs are the same.")
    warn_of_damage(a)
    warn_of_damage(b)
    return ExitCode.FAILURE if different or a.damaged or b.damaged else ExitCode.OK


def compare(a: RunData, b: RunData) -> list[Difference]:
    """Every kind of content, in the order in which a difference would spread."""
    left, right = _digests(a), _digests(b)
    both = left.merge(right, on="episode_id", suffixes=("_a", "_b"))
    both = both.sort_values(["step_a", "episode_id"], ignore_index=True)
    return [
        _compare_steps(a, b),
        _compare_presence(left, right),
        *(_compare_column(a, b, both, what) for what in (*TOKENS, *VALUES)),
        _compare_losses(a, b),
    ]


def _digests(run: RunData) -> pd.DataFrame:
    """One row per episode: its id, its step, and of all that is compared a digest or the value."""

    def read(shard: OpenShard, rows: Array) -> pd.DataFrame:
        columns = run.episode_columns()
        frame = pd.DataFrame({n: columns[n].read(shard, rows) for n in ("episode_id", "step")})
        offsets = shard["episodes/token_offsets"]
        for what, name in TOKENS.items():
            values = shard[f"tokens/{name}"]
            size = values.itemsize
            spans = zip(offsets[rows] * size, offsets[rows + 1] * size, strict=True)
            image = values.tobytes()
            frame[what] = np.fromiter((hash(image[i:j]) for i, j in spans), "i8", len(rows))
        frame["rewards"] = shard["episodes/reward"][rows]
        frame["advantages"] = shard["episodes/advantage"][rows]
        texts = shard["episodes/completion_text"][rows]
        frame["texts"] = np.fromiter(map(hash, texts), "i8", len(rows))
        return frame

    names = ["episode_id", "step", *TOKENS, *VALUES]
    frames = list(run.map_shards(read))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=names)


def _compare_steps(a: RunData, b: RunData) -> Difference:
    """Which groups each committed step trained on."""
    left, right = a.index.manifests, b.index.manifests
    steps = sorted(left.keys() | right.keys())
    groups = [
        [[g for g, _ in m[step].groups] if step in m else None for m in (left, right)]
        for step in steps
    ]
    different = [i for i, (x, y) in enumerate(groups) if x != y]
    first = ""
    if different:
        x, y = groups[different[0]]
        first = f"step {steps[different[0]]}: groups {_short(x)} in A, {_short(y)} in B"
    return Difference(
        what="steps' groups", n_compared=len(steps), n_different=len(different), first=first
    )


def _compare_presence(left: pd.DataFrame, right: pd.DataFrame) -> Difference:
    """Episodes that only one of the runs holds."""
    firsts, n_different = [], 0
    for name, frame, other in (("A", left, right), ("B", right, left)):
        only = frame[~frame["episode_id"].isin(other["episode_id"])]
        if len(only):
            episode_id = only.sort_values(["step", "episode_id"])["episode_id"].iloc[0]
            firsts.append(f"episode {episode_id} is in {name} only ({len(only):,} such)")
            n_different += len(only)
    n_both = int(left["episode_id"].isin(right["episode_id"]).sum())
    return Difference(
        what="episodes",
        n_compared=n_both + n_different,
        n_different=n_different,
        first="; ".join(firsts),
    )


def _compare_column(a: RunData, b: RunData, both: pd.DataFrame, what: str) -> Difference:
    """Digests or values of the episodes that both runs hold."""
    if both.empty:
        return Difference(what=what, n_compared=0, n_different=0)
    x, y = both[f"{what}_a"].to_numpy(), both[f"{what}_b"].to_numpy()
    is_number = what in ("rewards", "advantages")
    same = _same(x, y) if is_number else x == y
    different = both["episode_id"].to_numpy()[~same].tolist()
    first, largest = "", math.nan
    if different:
        if is_number:
            largest = _largest(x, y)
        if what == "log-probs":
            largest = _largest_logprob(a, b, different[:MOST_TOKENS])
        trained = both["step_a"][~same].iloc[0]
        step = "no step" if pd.isna(trained) else f"step {trained}"
        first = f"{step}, episode {different[0]}{_detail(a, b, different[0], what)}"
    return Difference(
        what=what,
        n_compared=len(both),
        n_different=len(different),
        first=first,
        largest=largest,
    )


def _detail(a: RunData, b: RunData, episode_id: int, what: str) -> str:
    """Where in the episode, and the two values."""
    if what in VALUES:
        x, y = (run.episodes([VALUES[what]], episode_ids=[episode_id]).iloc[0, 0] for run in (a, b))
        return f": {_short(x)} in A, {_short(y)} in B"
    x, y = (run.tokens(episode_id)[TOKENS[what]].to_numpy() for run in (a, b))
    shorter = min(len(x), len(y))
    at = np.flatnonzero(x[:shorter] != y[:shorter])
    if len(at):
        return f", token {at[0]}: {x[at[0]]} in A, {y[at[0]]} in B"
    return f": {len(x)} tokens in A, {len(y)} in B"


def _largest_logprob(a: RunData, b: RunData, ids: Sequence[int]) -> float:
    """Over those of the episodes whose token ids agree."""
    keys = ["episode_id", "position", "token_id"]
    left, right = (run.tokens(ids)[[*keys, "logprob"]] for run in (a, b))
    both = left.merge(right, on=keys, suffixes=("_a", "_b"))
    return float((both["logprob_a"] - both["logprob_b"]).abs().max())


def _compare_losses(a: RunData, b: RunData) -> Difference:
    tables = [run.steps().reindex(columns=["step", LOSS]) for run in (a, b)]
    both = tables[0].merge(tables[1], on="step", suffixes=("_a", "_b"))
    x, y = (both[f"{LOSS}_{run}"].astype("f8").to_numpy() for run in "ab")
    different = np.flatnonzero(~_same(x, y))
    first = ""
    if len(different):
        i = different[0]
        first = f"step {both['step'][i]}: {float(x[i])} in A, {float(y[i])} in B"
    return Difference(
        what="losses",
        n_compared=len(both),
        n_different=len(different),
        first=first,
        largest=_largest(x, y) if first else math.nan,
    )


def _same(x: Array, y: Array) -> Array:
    """Where two numbers are the same, NaN equal to itself."""
    same: Array = (x == y) | (np.isnan(x) & np.isnan(y))
    return same


def _largest(x: Array, y: Array) -> float:
    """Largest absolute difference where both are numbers; NaN where they never are."""
    apart = np.abs(x - y)
    apart = apart[~np.isnan(apart)]
    return float(apart.max()) if len(apart) else math.nan


def _short(value: object, most: int = 40) -> str:
    text = "none" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[:most]}..."
