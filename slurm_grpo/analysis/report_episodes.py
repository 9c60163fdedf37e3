"""The report's episodes: which ones are worth reading, and how they are shown.

The best and the worst of the latest policies, and one that could not be scored. Everything a model
wrote is escaped; tokens are tinted by log-probability where the tokenizer is at hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.analysis.terminal import printable
from slurm_grpo.analysis.token_text import token_texts

N_SHOWN = 3
MAX_TOKENS = 1500
"""Longer completions are cut, and say so."""
TINTS = ((0.5, ""), (0.1, "p1"), (0.01, "p2"), (0.0, "p3"))
"""Class of a token by the probability from which it applies."""


def choose(facts: Facts) -> dict[str, list[int]]:
    """Episode ids by heading: of the latest policies, each prompt once."""
    episodes = facts.episodes
    latest = episodes[episodes["version"].isin(facts.windows[1])] if facts.windows[1] else episodes
    scored = latest[latest["reward"].notna()]
    worst, best = (
        scored.sort_values(["reward", "version"], ascending=[lowest, False])
        .drop_duplicates("group_id")
        .head(N_SHOWN)
        for lowest in (True, False)
    )
    failed = episodes[episodes["is_error"]].tail(1)
    chosen = {
        "Worst answers of the latest policies": worst,
        "Best answers of the latest policies": best,
        "An answer that could not be scored": failed,
    }
    return {title: frame["episode_id"].tolist() for title, frame in chosen.items() if len(frame)}


def episodes_html(facts: Facts) -> str:
    """All chosen episodes, as articles under headings."""
    html: list[str] = []
    names = ["episode_id", "task", "step", "policy_version_min", "advantage", "finish_reason"]
    names += ["n_tokens", "prompt_text", "target_json", "completion_text"]
    names += [facts.columns.error, facts.columns.reward, *facts.columns.parts.values()]
    for title, ids in choose(facts).items():
        html.append(f'<h3>{escape(title)}</h3><div class="charts">')
        rows = facts.run.episodes(names, episode_ids=ids)
        tokens = facts.run.tokens(ids)
        for row in rows.to_dict("records"):
            mine = tokens[tokens["episode_id"] == row["episode_id"]]
            html.append(_article(facts, row, mine))
        html.append("</div>")
    if not html:
        return '<p class="missing">There are no episodes on disk.</p>'
    if facts.tokenizer is None:
        return "\n".join(html)
    marks = [
        f'<span class="{tint or "p0"}">{low:g} to {high:g}</span>'
        for (low, tint), high in zip(TINTS, [1.0, *(low for low, _ in TINTS)], strict=False)
    ]
    legend = f"Probability of a token when it was sampled: {' '.join(marks)}"
    return f'<p class="legend">{legend}</p>' + "\n".join(html)


def _article(facts: Facts, row: dict[str, Any], tokens: pd.DataFrame) -> str:
    columns = facts.columns
    values = {"reward": row[columns.reward], "advantage": row["advantage"]}
    values |= {name: row[column] for name, column in columns.parts.items()}
    chips = [f"<b>{escape(k)}</b> {_number(v)}" for k, v in values.items() if v is not None]
    step = "not trained on" if pd.isna(row["step"]) else f"trained on in step {row['step']}"
    facts_line = (
        f"{escape(str(row['task']))} · episode {row['episode_id']} · policy "
        f"{row['policy_version_min']} · {step} · {row['n_tokens']} tokens, "
        f"{'cut by the length limit' if row['finish_reason'] == 'length' else row['finish_reason']}"
    )
    error = f'<p class="bad">{escape(str(row[columns.error]))}</p>' if row[columns.error] else ""
    return (
        f'<article><p class="chips">{" ".join(f"<span>{c}</span>" for c in chips)}</p>{error}'
        f'<p class="small">{facts_line}</p>'
        f"<details><summary>Prompt, and the right answer <code>"
        f"{escape(_short(row['target_json']))}</code></summary>"
        f"<pre>{visible(row['prompt_text'])}</pre></details>"
        f"<pre>{_completion(facts, row, tokens)}</pre></article>"
    )


def _completion(facts: Facts, row: dict[str, Any], tokens: pd.DataFrame) -> str:
    text = str(row["completion_text"])
    if facts.tokenizer is None:
        more = " …" if len(text) > 4 * MAX_TOKENS else ""
        return visible(text[: 4 * MAX_TOKENS]) + more
    shown = tokens.head(MAX_TOKENS)
    pieces = token_texts(facts.tokenizer, shown["token_id"].tolist())
    more = f" … and {len(tokens) - len(shown)} more tokens" if len(tokens) > len(shown) else ""
    return "".join(map(_token, pieces, shown["logprob"].tolist())) + more


def _token(piece: str, logprob: float) -> str:
    probability = np.exp(logprob)
    tint = next(tint for bound, tint in TINTS if probability >= bound)
    if not tint:
        return visible(piece)
    return f'<span class="{tint}" title="p = {probability:.3g}">{visible(piece)}</span>'


def visible(text: str) -> str:
    """Escaped for a `<pre>`; what no page can show is spelled out."""
    return escape(printable(text))


def _short(target_json: str) -> str:
    text = str(json.loads(target_json))
    return text if len(text) <= 80 else text[:79] + "…"


def _number(value: float | Sequence[float]) -> str:
    return "-" if pd.isna(value) else f"{value:.4g}"
