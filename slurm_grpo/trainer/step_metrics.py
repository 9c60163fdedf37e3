"""What a step's episodes say: rewards, lengths, staleness, throughput. numpy only; no collective.

Each rank condenses its own groups; rank 0 combines what all ranks gathered. Names are
`what/which_unit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from slurm_grpo.types import Group

EpisodeStats: TypeAlias = Mapping[str, list[float]]
"""Values of a rank's episodes by name, small enough to gather: `length` (completion tokens),
`truncated`, `submitted` and `finished` (Unix seconds) of all; `staleness` of those with a token;
`reward` and `reward/<part>` of those that scored; and `spread` (max - min reward) of groups with
any such."""


def condense(groups: Sequence[Group], step: int) -> EpisodeStats:
    """This rank's share of the step's statistics."""
    stats: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for episode in group:
            completion = episode.completion
            stats["length"].append(len(completion.token_ids))
            stats["truncated"].append(completion.finish_reason == "length")
            stats["submitted"].append(completion.t_submit)
            stats["finished"].append(completion.t_finish)
            if len(completion.token_ids):
                stats["staleness"].append(step - 1 - episode.oldest_version)
        scored = [e for e in group if e.error is None and e.reward is not None]
        rewards = [e.reward for e in scored if e.reward is not None]
        stats["reward"] += rewards
        if rewards:
            stats["spread"].append(max(rewards) - min(rewards))
        for episode in scored:
            for name, value in episode.reward_parts.items():
                stats[f"reward/{name}"].append(value)
    return dict(stats)


def combine(trained: Sequence[EpisodeStats], set_aside: Sequence[EpisodeStats]) -> dict[str, float]:
    """The step's metrics over all ranks. A metric without a value is left out, never 0.

    What the policy does is told over all episodes generated for the step; `staleness/` and
    `selected/` are of those that were trained on.
    """
    of, selected = _join([*trained, *set_aside]), _join(trained)
    n, seconds = len(of["length"]), of["finished"].max() - of["submitted"].min()
    metrics: dict[str, float] = {
        "completion/length_mean": of["length"].mean(),
        "completion/length_max": of["length"].max(),
        "completion/truncation_rate": of["truncated"].mean(),
        "generator/tokens_per_s": of["length"].sum() / max(seconds, 1e-9),
        "generator/generate_s": seconds,
        "episodes/n": n,
        "episodes/n_errors": n - len(of["reward"]),
    }
    if "staleness" in selected:
        metrics["staleness/min"] = selected["staleness"].min()
        metrics["staleness/mean"] = selected["staleness"].mean()
        metrics["staleness/max"] = selected["staleness"].max()
    if len(of["reward"]):
        metrics["reward/mean"] = of["reward"].mean()
        metrics["reward/std"] = of["reward"].std()
        metrics["groups/zero_spread_fraction"] = (of["spread"] == 0).mean()
    if len(selected["reward"]):
        metrics["selected/reward_mean"] = selected["reward"].mean()
    metrics |= {name: of[name].mean() for name in sorted(of) if name.startswith("reward/")}
    if "reward/correct" in of:
        metrics["accuracy/train"] = (of["reward/correct"] == 1.0).mean()
    return {name: float(value) for name, value in metrics.items()}


def _join(stats: Sequence[EpisodeStats]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for s in stats for name in s)
    return {name: np.array([x for s in stats for x in s.get(name, [])], float) for name in names}
