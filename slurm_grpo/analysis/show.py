"""`slurm-grpo episodes show RUN`: single episodes to read, their tokens coloured by probability.

Picks the best and the worst (of equal ones the newest policy's), a whole group, or single episodes.
The text of tokens needs the model's tokenizer file and the `tokenizers` package; without them the
completion is shown as it was stored, and the tokens by their ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.text import Text

from slurm_grpo.analysis.columns import PART
from slurm_grpo.analysis.frame import RunData, open_run
from slurm_grpo.analysis.terminal import add_run, printable, warn_of_damage, width
from slurm_grpo.analysis.token_text import load_tokenizer, token_texts
from slurm_grpo.errors import AnalysisError, ExitCode

COLOURS = ((0.5, ""), (0.1, "yellow"), (0.01, "dark_orange3"), (0.0, "bold red"))
"""Style of a token by the probability above which it applies."""
N_LEAST = 4
COLUMNS = [
    *("episode_id", "group_id", "sample_index", "task", "step", "policy_version_min", "error"),
    *("reward", "advantage", "finish_reason", "prompt_text", "target_json", "completion_text"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--best", type=int, metavar="N", help="the N of highest reward")
    parser.add_argument("--worst", type=int, metavar="N", help="the N of lowest reward")
    parser.add_argument("--group", type=int, metavar="G", help="all episodes of a group (prompt)")
    parser.add_argument("--episode", type=int, nargs="+", metavar="E", help="episodes by id")
    parser.add_argument("--where", help="choose the best and worst among these: a condition")


def run(arguments: argparse.Namespace) -> int:
    opened = open_run(arguments.run)
    n_best, n_worst = arguments.best, arguments.worst
    if all(a is None for a in (n_best, n_worst, arguments.group, arguments.episode)):
        n_best = n_worst = 3
    chosen = {
        "best": _extreme(opened, n_best or 0, arguments.where, best=True),
        "worst": _extreme(opened, n_worst or 0, arguments.where, best=False),
        f"group {arguments.group}": _of_group(opened, arguments.group),
        "episode": arguments.episode or [],
    }
    console = Console(width=width(), highlight=False)
    tokenizer = load_tokenizer(opened.run, opened.config.get("model.path"))
    if tokenizer is None:
        console.print(
            "Tokens are shown by id: their text needs the tokenizers package and\n"
            f"{opened.config.get('model.path', 'the model directory')}/tokenizer.json\n"
        )
    if not any(chosen.values()):
        console.print("There is no such episode.")
    for title, ids in chosen.items():
        if ids:
            _print_all(console, opened, title, ids, tokenizer)
    if tokenizer is not None:
        console.print(_legend())
    warn_of_damage(opened)
    return ExitCode.OK


def _extreme(run: RunData, n: int, where: str | None, *, best: bool) -> list[int]:
    """Ids of the `n` scored episodes of highest or lowest reward, the newest policy's first."""
    if n <= 0:
        return []
    scored = run.episodes(["episode_id", "reward", "policy_version_min", "is_error"], where)
    scored = scored[~scored["is_error"].astype(bool)]
    scored = scored.sort_values(["reward", "policy_version_min"], ascending=[not best, False])
    ids: list[int] = scored["episode_id"].head(n).tolist()
    return ids


def _of_group(run: RunData, group_id: int | None) -> list[int]:
    if group_id is None:
        return []
    ids: list[int] = run.episodes(["episode_id"], f"group_id == {group_id}")["episode_id"].tolist()
    if not ids:
        raise AnalysisError(f"{run.run.root}: no group {group_id} among the episodes that count.")
    return ids


def _print_all(
    console: Console, run: RunData, title: str, ids: Sequence[int], tokenizer: Any | None
) -> None:
    """The episodes `ids`, one under the other."""
    parts = [PART + name for name in run.part_names]
    rows = run.episodes([*COLUMNS, *parts], episode_ids=ids).to_dict("records")
    tokens = run.tokens(ids)
    for number, row in enumerate(rows, start=1):
        label = f"{title} {number}" if title in ("best", "worst") else title
        step = "not trained on" if pd.isna(row["step"]) else f"step {row['step']}"
        facts = f"task {row['task']}, policy version {row['policy_version_min']}, {step}"
        console.print(Text(f"{label}: episode {row['episode_id']} ({facts})", style="bold"))
        console.print(Text(printable(_verdict(row, parts))))
        console.print("prompt")
        console.print(_indented(console, Text(printable(row["prompt_text"].rstrip("\n")))))
        console.print(Text(f"expected {printable(row['target_json'])}"))
        _print_answer(console, row, tokens[tokens["episode_id"] == row["episode_id"]], tokenizer)
        console.print()


def _verdict(row: dict[str, Any], parts: Sequence[str]) -> str:
    """Reward, its parts and the advantage; or why there are none."""
    if not pd.isna(row["error"]):
        return f"scoring failed: {row['error']}"
    named = [("reward", "reward"), *((part.removeprefix(PART), part) for part in parts)]
    values = [f"{name} {row[column]:.3f}" for name, column in named if not pd.isna(row[column])]
    if not pd.isna(row["advantage"]):
        values.append(f"advantage {row['advantage']:+.3f}")
    return "  ".join(values)


def _print_answer(
    console: Console, row: dict[str, Any], tokens: pd.DataFrame, tokenizer: Any | None
) -> None:
    """The completion, coloured, and what the policy thought of it."""
    ids, logprobs = tokens["token_id"].tolist(), tokens["logprob"].to_numpy()
    end = "cut at the length limit" if row["finish_reason"] == "length" else row["finish_reason"]
    console.print(f"answer ({len(ids)} tokens, {end})")
    names = [printable(p) for p in token_texts(tokenizer, ids)] if tokenizer else []
    styles = [_style(logprob) for logprob in logprobs.tolist()]
    if tokenizer is not None:
        answer = Text.assemble(*zip(names, styles, strict=True))
    else:
        answer = Text(printable(row["completion_text"]) + "\n")
        answer.append_text(Text.assemble(*((f"{i} ", s) for i, s in zip(ids, styles, strict=True))))
    console.print(_indented(console, answer))
    if ids:
        least = np.argsort(logprobs)[:N_LEAST].tolist()
        named = [f"{names[i]!r}" if names and names[i] else f"id {ids[i]}" for i in least]
        found = [f"{n} {np.exp(logprobs[i]):.2g}" for n, i in zip(named, least, strict=True)]
        mean = f"mean log-probability {logprobs.mean():.2f}"
        console.print(Text(f"{mean}; least likely: {', '.join(found)}"))


def _indented(console: Console, text: Text) -> Text:
    lines = text.wrap(console, console.width - 2)
    return Text("\n").join(Text("  ").append_text(line) for line in lines)


def _style(logprob: float) -> str:
    return next(style for bound, style in COLOURS if np.exp(logprob) >= bound)


def _legend() -> Text:
    legend = Text("token probability: ")
    for (bound, style), above in zip(COLOURS, (1.0, *(b for b, _ in COLOURS)), strict=False):
        legend.append(f"{bound:g} to {above:g}", style=style)
        legend.append("  ")
    return legend
