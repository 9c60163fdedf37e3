"""What a table of episodes or groups may hold, and how each column is read from an open shard.

Called by `frame.py` with one shard at a time. Promises that a column reads no more of the file than
it needs, and that texts are decoded for the rows asked for only. Knows nothing of other shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import h5py
import numpy as np
import pandas as pd

from slurm_grpo.analysis.index import ShardEntry
from slurm_grpo.staging import layout
from slurm_grpo.staging.layout import Array

PART = "part_"
"""Prefix of a reward part's column."""
FEW = 16
"""Rows of a text column are read one by one when they are fewer than one in FEW."""


class OpenShard:
    """One shard while it is open. A dataset is read once, when it is first asked for."""

    def __init__(self, file: h5py.File, entry: ShardEntry) -> None:
        self.entry = entry
        self.kept: dict[Any, Any] = {}
        """What readers of columns keep about this shard while it is open."""
        self._file = file
        self._read: dict[str, Array] = {
            "groups/group_id": entry.group_ids,
            "groups/episode_offsets": entry.episode_offsets,
        }

    def __getitem__(self, path: str) -> Array:
        """The whole dataset; text as JSON bytes."""
        if path not in self._read:
            self._read[path] = layout.read_column(self._file, path)
        return self._read[path]

    def span(self, path: str, first: int, stop: int) -> Array:
        """Rows `first` to `stop` of a dataset."""
        if path in self._read:
            return self._read[path][first:stop]
        return layout.read_column(self._file, path, (first, stop))

    def raw(self, path: str, rows: Array) -> Array:
        """Rows of a text dataset as JSON bytes; of few rows no others are read."""
        n_rows = len(self.entry.group_ids if path.startswith("groups/") else self.groups)
        if len(rows) * FEW > n_rows:
            return self[path][rows]
        found = np.empty(len(rows), object)
        for i, row in enumerate(rows.tolist()):
            found[i] = self.span(path, row, row + 1)[0]
        return found

    @property
    def groups(self) -> Array:
        """[N] index of each episode's group in this file."""
        if "group" not in self._read:
            counts = np.diff(self.entry.episode_offsets)
            self._read["group"] = np.repeat(np.arange(len(counts)), counts)
        return self._read["group"]

    @property
    def is_error(self) -> Array:
        """[N] bool: scoring failed."""
        codes = self["episodes/finish_reason"]
        return np.equal(codes, layout.ERROR_CODE)

    @property
    def scored(self) -> Array:
        """[N] float32: rewards, NaN where scoring failed."""
        return np.where(self.is_error, np.float32(np.nan), self["episodes/reward"])


Reader: TypeAlias = Callable[[OpenShard, Array], Any]
"""(shard, row positions) to a numpy array, a Categorical or a nullable integer array."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    read: Reader
    description: str


def decode(raw: Array) -> list[Any]:
    """The values of JSON texts, in one call of the parser. A lone surrogate, which no column of
    UTF-8 can hold, becomes a replacement character."""
    values: list[Any] = json.loads(b"[" + b",".join(raw) + b"]")
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return [_encodable(value) if isinstance(value, str) else value for value in values]
    return values


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _stored(path: str) -> TableColumn:
    return TableColumn(lambda shard, rows: shard[path][rows], layout.BY_PATH[path].description)


def _text(path: str, description: str, *, as_json: bool = False) -> TableColumn:
    """A text of an episode or group; `as_json` keeps it as it is stored."""

    def read(shard: OpenShard, rows: Array) -> Array:
        unique, back = np.unique(rows, return_inverse=True)
        raw = shard.raw(path, unique)
        texts = [text.decode() for text in raw] if as_json else decode(raw)
        return np.array([*texts, None], object)[back]

    return TableColumn(read, description)


def _task(shard: OpenShard, rows: Array) -> pd.Categorical:
    codes, raw = pd.factorize(shard["groups/task"])
    return pd.Categorical.from_codes(codes[rows], decode(raw))


def _constant(value: Callable[[ShardEntry], Any], description: str) -> TableColumn:
    def read(shard: OpenShard, rows: Array) -> Any:
        constant = value(shard.entry)
        if isinstance(constant, str):
            return pd.Categorical.from_codes(np.zeros(len(rows), "i1"), [constant])
        return np.full(len(rows), constant)

    return TableColumn(read, description)


def _nullable(values: Array, absent: Array) -> Any:
    return pd.arrays.IntegerArray(values.astype("i8"), absent)


def _step(shard: OpenShard, rows: Array) -> Any:
    steps = shard.entry.steps[rows]
    return _nullable(steps, steps == 0)


def _staleness(steps: Array, oldest: Array) -> Any:
    return _nullable(steps - 1 - oldest, (steps == 0) | (oldest < 0))


def _of_episodes(values: Callable[[OpenShard], Any], how: str, description: str) -> TableColumn:
    """A column of groups: `values` of a shard's episodes, reduced as pandas names it. No group is
    empty."""

    def read(shard: OpenShard, rows: Array) -> Any:
        options = {"ddof": 0} if how == "std" else {}
        groups = pd.Series(values(shard)).groupby(shard.groups)
        return groups.agg(how, **options).to_numpy()[rows]

    return TableColumn(read, description)


def _rewards(how: str, dtype: str = "f8") -> TableColumn:
    return _of_episodes(lambda shard: shard.scored.astype(dtype), how, "Of those scored")


def _versions(end: str, description: str) -> TableColumn:
    """The versions of those with a token, as NaN marks the others; -1 where none has one."""

    def known(shard: OpenShard) -> Array:
        values = shard[f"episodes/policy_version_{end}"]
        return np.where(values < 0, np.nan, values)

    found = _of_episodes(known, end, description)
    return TableColumn(lambda *of: np.nan_to_num(found.read(*of), nan=-1).astype("i8"), description)


def _group_staleness(shard: OpenShard, rows: Array) -> Any:
    return _staleness(
        shard.entry.steps[rows], GROUP_COLUMNS["policy_version_min"].read(shard, rows)
    )


def _failures(shard: OpenShard, rows: Array) -> tuple[Array, list[Any]]:
    """Which of `rows` failed to score, and what is known of each."""
    failed = np.flatnonzero(shard.is_error[rows])
    return failed, decode(shard.raw("episodes/info_json", rows[failed]))


def _error(shard: OpenShard, rows: Array) -> Array:
    found = np.full(len(rows), None, object)
    failed, infos = _failures(shard, rows)
    found[failed] = [info.get("error") for info in infos]
    return found


def _finish_reason(shard: OpenShard, rows: Array) -> pd.Categorical:
    codes = shard["episodes/finish_reason"][rows].astype("i1")
    failed, infos = _failures(shard, rows)
    names = layout.FINISH_REASONS
    codes[failed] = [names.index(info.get("finish_reason", "error")) for info in infos]
    return pd.Categorical.from_codes(codes, list(names))


def _of_group(column: TableColumn) -> TableColumn:
    return TableColumn(
        lambda shard, rows: column.read(shard, shard.groups[rows]), column.description
    )


def _lengths(path: str) -> Reader:
    return lambda shard, rows: np.diff(shard[path])[rows]


_SHARED = {
    "group_id": _stored("groups/group_id"),
    "task": TableColumn(_task, "Task name"),
    "step": TableColumn(_step, "Step that trained on it; <NA>: none did"),
    "superseded": TableColumn(
        lambda shard, rows: shard.entry.superseded[rows],
        "Of an attempt that a later one went back over, or a copy of a group that counts",
    ),
    "attempt": _constant(lambda entry: entry.name.attempt, "Attempt that made it"),
    "engine_id": _constant(lambda entry: entry.name.engine_id, "Engine that made it"),
    "shard": _constant(lambda entry: entry.path, "File that holds it, in the run directory"),
    "n_prompt_tokens": TableColumn(_lengths("groups/prompt_offsets"), "Prompt tokens"),
    "prompt_text": _text("groups/prompt_text", "The text that was tokenised"),
    "target_json": _text("groups/target_json", "The right answer, as JSON", as_json=True),
}

GROUP_COLUMNS: dict[str, TableColumn] = _SHARED | {
    "n_episodes": TableColumn(_lengths("groups/episode_offsets"), "Episodes"),
    "n_errors": _of_episodes(lambda shard: shard.is_error, "sum", "Episodes that failed to score"),
    "n_unique_answers": _of_episodes(
        lambda shard: shard["episodes/completion_text"], "nunique", "Distinct completion texts"
    ),
    "reward_mean": _rewards("mean"),
    "reward_std": _rewards("std"),
    "reward_min": _rewards("min", "f4"),
    "reward_max": _rewards("max", "f4"),
    "zero_spread": TableColumn(
        lambda *of: _rewards("nunique").read(*of) <= 1, "All rewards are equal: no gradient"
    ),
    "policy_version_min": _versions("min", "Oldest token's version; -1: no token"),
    "policy_version_max": _versions("max", "Newest token's version; -1: no token"),
    "staleness": TableColumn(_group_staleness, "Steps the oldest token lagged when trained on"),
    "n_tokens": _of_episodes(
        lambda shard: np.diff(shard["episodes/token_offsets"]),
        "sum",
        "Completion tokens, all episodes",
    ),
}
"""Columns of `RunData.groups`, by name."""

EPISODE_COLUMNS: dict[str, TableColumn] = {
    "episode_id": _stored("episodes/episode_id"),
    "sample_index": TableColumn(
        lambda shard, rows: shard["episodes/episode_id"][rows] % layout.MAX_SAMPLES,
        "Index in the group",
    ),
    **{name: _of_group(column) for name, column in _SHARED.items()},
    "sample_seed": _stored("episodes/sample_seed"),
    "reward": _stored("episodes/reward"),
    "advantage": _stored("episodes/advantage"),
    "finish_reason": TableColumn(_finish_reason, "Why the completion ended"),
    "is_error": TableColumn(
        lambda shard, rows: shard.is_error[rows], "Scoring failed: reward 0, never trained on"
    ),
    "error": TableColumn(_error, "Why scoring failed; missing: it did not"),
    "policy_version_min": _stored("episodes/policy_version_min"),
    "policy_version_max": _stored("episodes/policy_version_max"),
    "staleness": TableColumn(
        lambda shard, rows: _staleness(
            shard.entry.steps[shard.groups[rows]], shard["episodes/policy_version_min"][rows]
        ),
        "Steps the oldest token lagged when trained on",
    ),
    "n_tokens": TableColumn(_lengths("episodes/token_offsets"), "Completion tokens"),
    "t_submit": _stored("episodes/t_submit"),
    "t_first_token": _stored("episodes/t_first_token"),
    "t_finish": _stored("episodes/t_finish"),
    "completion_text": _text("episodes/completion_text", "The completion"),
}
"""Columns of `RunData.episodes`, by name; one `part_<name>` per reward part comes with them."""


def part_column(name: str) -> TableColumn:
    """The column of a reward part; NaN in shards that lack it."""

    def read(shard: OpenShard, rows: Array) -> Array:
        if name not in shard.entry.part_names:
            return np.full(len(rows), np.nan, "f4")
        parts = shard["episodes/reward_parts"][:, shard.entry.part_names.index(name)]
        return parts[rows]

    return TableColumn(read, f"Reward part {name}, unweighted; NaN: not applicable")
