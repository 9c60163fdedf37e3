"""What the report and the summary say in numbers: one reading of a run, and the answers drawn from
it.

Between `frame.py` and the pages of `report.py` and `summary_table.py`. Every number is computed
here, from episodes that count and from the trainer's metrics; a number that cannot be known is NaN
or left out, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from slurm_grpo.analysis.frame import RunData
from slurm_grpo.analysis.rescored import reward_columns
from slurm_grpo.analysis.token_text import load_tokenizer
from slurm_grpo.run.metrics import Row, read_run_metrics
from slurm_grpo.run.plots import Points, series
from slurm_grpo.run.summary import PHASES, evaluations
from slurm_grpo.run.words import PHASE_LABELS

PHASE_NAMES = {p: name for p, name in PHASE_LABELS.items() if p != "pause"}
"""Phases that add up to a step, with their names; what is left is `other`."""


@dataclass(frozen=True, slots=True)
class Change:
    """A mean among the earliest and the latest policies, prompts weighing alike."""

    early: float
    late: float
    error: float
    """Standard error of the difference, from the spread between prompts."""

    @property
    def difference(self) -> float:
        return self.late - self.early


class Facts:
    """One run, read once; with the rewards of `score`, if that names a rescoring."""

    def __init__(self, run: RunData, score: str | None = None) -> None:
        self.run = run
        self.score = score
        self.columns = reward_columns(run.episode_columns(), score)
        self.rows: list[Row] = read_run_metrics(run.run, "trainer")
        self.steps = [row for row in self.rows if "trainer/step_s" in row]
        self.evaluations = evaluations(self.rows)

    @cached_property
    def tokenizer(self) -> Any | None:
        """Of the model; None: tokens have no texts here."""
        return load_tokenizer(self.run.run, self.run.config.get("model.path"))

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """Every episode that counts. `reward` and the parts, by their columns' names, are NaN where
        scoring failed. `is_cut`: ended by the length limit. `version`: the oldest token's; -1
        without tokens. `mismatch`: that of its step."""
        names = ["episode_id", "group_id", "task", "step", "staleness", "n_tokens"]
        names += ["finish_reason", "policy_version_min", self.columns.error, self.columns.reward]
        parts = list(self.columns.parts.values())
        found = self.run.episodes([*names, *parts]).rename(
            columns={"policy_version_min": "version", self.columns.reward: "reward"}
        )
        found["is_error"] = found.pop(self.columns.error).notna()
        found["is_cut"] = found.pop("finish_reason") == "length"
        found.loc[found["is_error"], ["reward", *parts]] = np.nan
        by_step = dict(zip(*self.points("trainer/mismatch_k3_nats"), strict=True))
        found["mismatch"] = found["step"].map(by_step).astype("f8")
        return found

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Every group that counts; `zero_spread`: no two of its rewards differ."""
        names = ["group_id", "task", "policy_version_min", "n_unique_answers", "n_episodes"]
        found = self.run.groups(names).rename(columns={"policy_version_min": "version"})
        n_rewards = self.episodes.groupby("group_id")["reward"].nunique()
        found["zero_spread"] = found["group_id"].map(n_rewards) <= 1
        return found

    def summarize(self, by: str) -> pd.DataFrame:
        """One row per value of the column `by`, which episodes and groups have. The last columns
        are the reward's parts, by their columns' names."""
        of = self.episodes.groupby(by, observed=True)
        prompts = self.groups.groupby(by, observed=True)
        return pd.DataFrame(
            {
                "episodes": of.size(),
                "prompts": prompts.size(),
                "reward": of["reward"].mean(),
                "length": of["n_tokens"].mean(),
                "cut": of["is_cut"].mean(),
                "errors": of["is_error"].sum(),
                "zero": prompts["zero_spread"].mean(),
                "stale": of["staleness"].mean().astype("f8"),
                "unique": prompts["n_unique_answers"].sum() / prompts["n_episodes"].sum(),
                "mismatch": of["mismatch"].mean(),
                **{column: of[column].mean() for column in self.columns.parts.values()},
            }
        )

    @cached_property
    def trained(self) -> pd.DataFrame:
        """The episodes that a committed step trained on."""
        return self.episodes[self.episodes["step"].notna()]

    @cached_property
    def windows(self) -> tuple[list[int], list[int]]:
        """The earliest and the latest fifth of the policy versions; both empty below two."""
        versions = sorted(v for v in self.episodes["version"].unique().tolist() if v >= 0)
        size = max(1, len(versions) // 5)
        return (versions[:size], versions[-size:]) if len(versions) > 1 else ([], [])

    def change(self, column: str = "reward", task: str | None = None) -> Change | None:
        """How a column's mean changed over the run; None where one end has nothing."""
        chosen = self._of(task)
        means = []
        for window in self.windows:
            of = chosen[chosen["version"].isin(window)]
            means.append(of.groupby("group_id")[column].mean().dropna())
        if not means or any(m.empty for m in means):
            return None
        early, late = means
        error = math.sqrt(sum(m.var(ddof=1) / len(m) if len(m) > 1 else math.nan for m in means))
        return Change(float(early.mean()), float(late.mean()), error)

    def _of(self, task: str | None) -> pd.DataFrame:
        return self.episodes if task is None else self.episodes[self.episodes["task"] == task]

    @cached_property
    def tasks(self) -> pd.DataFrame:
        """`summarize` by task, and `change` of the reward; empty without episodes."""
        if self.episodes.empty:
            return pd.DataFrame()
        table = self.summarize("task").reset_index().astype({"task": str})
        table["change"] = [self.change(task=task) for task in table["task"]]
        return table

    def points(self, key: str) -> Points:
        """A trainer metric over steps."""
        return series(self.rows, key)

    def by_step(self, column: str, q: float | None = None) -> Points:
        """The mean, or the quantile `q`, of each step's trained episodes."""
        of = self.trained.groupby("step")[column]
        values = (of.mean() if q is None else of.quantile(q)).dropna()
        return values.index.astype("f8").tolist(), values.astype("f8").tolist()

    def by_version(self, column: str, task: str | None = None) -> Points:
        """A column's mean over all episodes of each policy version, trained on or not, at the step
        that follows the version."""
        chosen = self._of(task)
        values = chosen[chosen["version"] >= 0].groupby("version")[column].mean().dropna()
        return (values.index + 1).tolist(), values.astype("f8").tolist()

    def phases(self) -> pd.DataFrame:
        """Seconds of each phase in each step, by step; `other` is what the phases leave."""
        table = pd.DataFrame(
            {
                name: [row.get(PHASES[p]) or 0.0 for row in self.steps]
                for p, name in PHASE_NAMES.items()
            },
            index=[row["step"] for row in self.steps],
        ).astype("f8")
        total = np.array([row["trainer/step_s"] for row in self.steps], "f8")
        table["other"] = np.maximum(0.0, total - table.sum(axis=1))
        return table

    def over_steps(self, key: str, reduce: Callable[[Sequence[float]], Any] = np.median) -> float:
        """The median, or what else, of a trainer metric over the steps; NaN without any."""
        values = self.points(key)[1]
        return float(reduce(values)) if values else math.nan
