"""What a step's episodes say: rewards, lengths, staleness, throughput. numpy only; no collective.

Each rank condenses its own groups; rank 0 combines what all ranks gathered. Names are
`what/which_unit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_grpo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStats:
    """One value per episode of a rank's groups, small enough to gather."""

    rewards: list[float] = field(default_factory=list)  # of episodes that scored
    parts: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # completion tokens
    truncated: list[bool] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    group_spread: list[float] = field(default_factory=list)  # per group: max - min reward
    n_errors: int = 0
    t_submit: float = float("inf")
    t_finish: float = float("-inf")


def condense(groups: Sequence[Group], step: int) -> EpisodeStats:
    """This rank's share of the step's statistics."""
    episodes = [episode for group in groups for episode in group]
    scored = [e for e in episodes if e.error is None and e.reward is not None]
    parts: dict[str, list[float]] = {}
    for episode in scored:
        for name, value in episode.reward_parts.items():
            parts.setdefault(name, []).append(value)
    spreads = [
        max(rewards) - min(rewards)
        for group in groups
        if (rewards := [e.reward for e in group if e.error is None and e.reward is not None])
    ]
    return EpisodeStats(
        rewards=[e.reward for e in scored if e.reward is not None],
        parts=parts,
        lengths=[len(e.completion.token_ids) for e in episodes],
        truncated=[e.completion.finish_reason == "length" for e in episodes],
        staleness=[step - 1 - e.oldest_version for e in episodes if len(e.completion.token_ids)],
        group_spread=spreads,
        n_errors=len(episodes) - len(scored),
        t_submit=min((e.completion.t_submit for e in episodes), default=float("inf")),
        t_finish=max((e.completion.t_finish for e in episodes), default=float("-inf")),
    )


def combine(stats: Sequence[EpisodeStats]) -> dict[str, float]:
    """The step's metrics over all ranks. A metric without a value is left out, never 0."""
    rewards = np.array([r for s in stats for r in s.rewards])
    lengths = np.array([n for s in stats for n in s.lengths])
    staleness = np.array([n for s in stats for n in s.staleness])
    spreads = np.array([x for s in stats for x in s.group_spread])
    seconds = max(s.t_finish for s in stats) - min(s.t_submit for s in stats)
    metrics: dict[str, float] = {
        "completion/length_mean": float(lengths.mean()),
        "completion/length_max": float(lengths.max()),
        "completion/truncation_rate": float(np.mean([t for s in stats for t in s.truncated])),
        "generator/tokens_per_s": float(lengths.sum() / max(seconds, 1e-9)),
        "generator/generate_s": float(seconds),
        "episodes/n": float(len(lengths)),
        "episodes/n_errors": float(sum(s.n_errors for s in stats)),
    }
    if len(staleness):
        metrics["staleness/min"] = float(staleness.min())
        metrics["staleness/mean"] = float(staleness.mean())
        metrics["staleness/max"] = float(staleness.max())
    if len(rewards):
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std())
        metrics["groups/zero_spread_fraction"] = float((spreads == 0).mean())
    for name in sorted({name for s in stats for name in s.parts}):
        values = [v for s in stats for v in s.parts.get(name, [])]
        metrics[f"reward/{name}"] = float(np.mean(values))
        if name == "correct":
            metrics["accuracy/train"] = float(np.mean(np.array(values) == 1.0))
    return metrics
