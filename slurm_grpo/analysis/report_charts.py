"""The report's charts: which question each answers, from `Facts` to inline SVG.

A chart whose data the run does not have says so in its place. How a chart looks is `plots.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from slurm_grpo.analysis.report_facts import Facts
from slurm_grpo.run import plots
from slurm_grpo.run.plots import Points
from slurm_grpo.run.summary import evaluation_keys

MAX_TASKS = 6
"""Lines, or rows of a heat map, that tasks may have; the most frequent ones are shown."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page; without `svg`, `caption` says what is missing."""

    title: str
    caption: str
    svg: str


def learning_charts(facts: Facts) -> list[Chart]:
    """Reward and evaluation over steps, by task and by part."""
    charts = [_reward(facts)]
    tasks = facts.episodes["task"].value_counts().index.astype(str).tolist()
    if len(facts.episodes) > len(facts.trained) or len(tasks) > 1:
        title = "Reward of all episodes, by task"
        lines = {task: facts.by_version("reward", task) for task in tasks[:MAX_TASKS]}
        if len(tasks) == 1:
            title = "Reward of all episodes"
            lines = {"all": lines[tasks[0]], "trained on": _reward_points(facts)}
        caption = (
            "Means over all episodes that each policy wrote, at the step after it; a step trains "
            "on a selection of them."
        )
        charts.append(_lines(title, caption, lines))
    charts.append(_parts(facts, tasks))
    errors = [
        (row["step"], row["episodes/n_errors"] / row["episodes/n"])
        for row in facts.steps
        if row.get("episodes/n")
    ]
    shares = {
        "right answers": facts.points("accuracy/train"),
        "groups of equal rewards": facts.points("groups/zero_spread_fraction"),
        "scoring errors": ([s for s, _ in errors], [share for _, share in errors]),
    }
    caption = "Shares of a step's episodes or groups. Groups of equal rewards teach nothing."
    charts.append(_lines("What steps were made of", caption, shares))
    dropped = {
        "without signal": facts.points("groups/dropped_no_signal"),
        "too stale": facts.points("groups/dropped_stale"),
    }
    if any(sum(points[1]) for points in dropped.values()):
        caption = "Groups that were generated and not trained on: work that a step waits for."
        charts.append(_lines("Dropped groups", caption, dropped))
    return charts


def length_charts(facts: Facts) -> list[Chart]:
    """How long answers are, and how they end."""
    if facts.trained.empty:
        return [_missing("Answer length")]
    low, middle, high = (facts.by_step("n_tokens", q=q) for q in (0.1, 0.5, 0.9))
    name = "median; band: 10 to 90 %"
    band = plots.band_chart("Answer length over steps", low, middle, high, name)
    early, late = (
        facts.episodes["n_tokens"][facts.episodes["version"].isin(w)] for w in facts.windows
    )
    samples = {"earliest fifth": early.tolist(), "latest fifth": late.tolist()}
    if not facts.windows[0]:
        samples = {"all": facts.episodes["n_tokens"].tolist()}
    histogram = plots.histogram("Answer length, distribution", samples, "tokens")
    caption = "Share of answers that the length limit cut short: a reward judges a fragment there."
    cut = {"cut short": facts.points("completion/truncation_rate")}
    return [
        Chart("Answer length", "Tokens of the answers in each step.", band),
        Chart("Length distribution", "Answers of the earliest and the latest policies.", histogram),
        _lines("Answers cut short", caption, cut),
    ]


def policy_charts(facts: Facts) -> list[Chart]:
    """How far the data is from the policy that it trains."""
    caption = "Steps that an episode's oldest token lagged when it was trained on. 0: on-policy."
    ages = facts.trained["staleness"].dropna().astype(int)
    staleness = _missing("Staleness")
    if len(ages):
        svg = plots.histogram("Staleness", {"episodes": ages.tolist()}, "steps behind")
        staleness = Chart("Staleness", caption, svg)
    k3 = "KL divergence between the policy that wrote the tokens and the one being trained."
    apart = "Between the two sides for the same tokens, nats. Large ones are worth a look."
    worst = {
        "largest in a step": facts.points("trainer/mismatch_max_nats"),
        "of a fixed prompt, mean": facts.points("sync/probe_mean_abs_diff"),
    }
    mismatch = {"k3 estimate": facts.points("trainer/mismatch_k3_nats")}
    return [
        staleness,
        _lines("Mismatch of trainer and generator", k3, mismatch, log=True),
        _lines("Log-probability differences", apart, worst),
    ]


def training_charts(facts: Facts) -> list[Chart]:
    """Clipping, loss, gradient, entropy."""
    wanted = {
        "Clipping": ("clip_fraction", "Share of trained tokens whose gradient the clip removed."),
        "Loss": ("loss", "Of the clipped objective; its size says little, its jumps do."),
        "Gradient norm": ("grad_norm", "Before clipping to max_grad_norm."),
        "Entropy": ("entropy_nats", "Of trained tokens, nats. Towards 0: no more exploration."),
    }
    return [
        _lines(title, caption, {title.lower(): facts.points(f"trainer/{key}")})
        for title, (key, caption) in wanted.items()
    ]


def time_charts(facts: Facts) -> list[Chart]:
    """Where the seconds of a step went, and how fast both sides were."""
    if not facts.steps:
        return [_missing("Seconds per step")]
    table = facts.phases()
    share = table.sum() / table.to_numpy().sum()
    small = [name for name in table if share[name] < 0.01 and name != "other"]
    table["other"] += table[small].sum(axis=1)
    parts = {name: table[name].tolist() for name in table if name not in small}
    svg = plots.stacked_chart("Seconds per step", "seconds", table.index.tolist(), parts)
    speed = {
        "generated": facts.points("generator/tokens_per_s"),
        "trained": facts.points("trainer/tokens_per_s"),
    }
    return [
        Chart("Seconds per step", "Each phase of the trainer's step.", svg),
        _lines("Tokens per second", "While the side in question was at work.", speed),
    ]


def _reward(facts: Facts) -> Chart:
    points = facts.points("reward/mean") if facts.score is None else facts.by_version("reward")
    if not points[0]:
        return _missing("Reward")
    sparse = {}
    for name, key in evaluation_keys(facts.rows).items():
        label = f"{name.replace('_', '-')} {key.rpartition('/')[2]} (greedy)"
        sparse[label] = facts.points(key)
    svg = plots.trend_chart("Reward over steps", "reward of a step", points, sparse)
    return Chart("Reward", "Mean over all episodes generated for a step, trained on or not.", svg)


def _reward_points(facts: Facts) -> Points:
    """Of the groups that steps trained on. From the metrics, which outlive the episodes, unless
    other rewards are asked for. Older runs call it `reward/mean`."""
    selected = facts.points("selected/reward_mean")
    points = selected if selected[0] else facts.points("reward/mean")
    return points if facts.score is None and points[0] else facts.by_step("reward")


def _parts(facts: Facts, tasks: Sequence[str]) -> Chart:
    several = [None] if len(tasks) < 2 else [None, *tasks[:MAX_TASKS]]
    columns = {"reward": "reward", **facts.columns.parts}
    found = {
        name + (f" ({task})" if task else ""): facts.by_version(column, task)
        for name, column in columns.items()
        for task in several
    }
    found = {name: points for name, points in found.items() if points[0]}
    if not found:
        return _missing("Reward parts over time")
    table = pd.DataFrame({name: pd.Series(y, x) for name, (x, y) in found.items()}).sort_index()
    rows = {name: table[name].tolist() for name in table}
    svg = plots.heat_map("Reward parts over time", table.index.tolist(), rows)
    caption = "Each row from its lowest (pale) to its highest mean; the range stands at its left."
    return Chart("Reward parts over time", caption, svg)


def _lines(title: str, caption: str, lines: Mapping[str, Points], *, log: bool = False) -> Chart:
    found = {name: points for name, points in lines.items() if len(points[0])}
    if not found:
        return _missing(title)
    values = [value for points in found.values() for value in points[1]]
    log = log and min(values) > 0 and max(values) > 20 * min(values)
    return Chart(title, caption, plots.line_chart(title, found, log=log))


def _missing(title: str) -> Chart:
    return Chart(title, "Nothing to show yet: the run has no such values.", "")
