"""Rewards that `slurm-grpo rescore` added to a run: files beside its shards, columns of its tables.

    episodes/rescored/<name>/rescoring.json   which scorer, and the names of its parts
    episodes/rescored/<name>/<shard>          rewards of the shard of that name, row by row

A file says which bytes it was made from (the CRC in the shard's name) and which episodes its rows
are; one that disagrees with its shard is never read as if it did. Shards themselves are not
touched. Knows nothing of how scores come about.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from slurm_grpo.analysis.columns import PART as OWN_PART
from slurm_grpo.analysis.columns import OpenShard, TableColumn, decode
from slurm_grpo.errors import AnalysisError, ShardError
from slurm_grpo.fsio import read_whole, storage_errors, write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.layout import TEXT, Array
from slurm_grpo.staging.shards import ShardName, shard_errors
from slurm_grpo.tasks.scorer import ScoreResult

logger = logging.getLogger(__name__)

SCHEMA = "slurm_grpo.rescored/1"
REWARD, ERROR, PART = "_reward", "_error", "_part_"
"""What a rescoring's name is followed by in the names of its columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescoring:
    """One scorer's view of a run."""

    name: str
    scorer: dict[str, Any]
    """Settings that decide the scores, as JSON; another scorer needs another name."""
    part_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardColumns:
    """Where a table of episodes holds the rewards of one scorer."""

    reward: str
    error: str
    parts: dict[str, str]
    """Columns by the part's own name."""


def reward_columns(known: Iterable[str], score: str | None) -> RewardColumns:
    """Those of the rescoring `score`, None: of the run's own scorer, among the `known` columns.

    Raises AnalysisError when there is no such rescoring.
    """
    known = list(known)
    reward, error, part = "reward", "error", OWN_PART
    if score is not None:
        reward, error, part = score + REWARD, score + ERROR, score + PART
    if reward not in known:
        names = [n.removesuffix(REWARD) for n in known if n.endswith(REWARD)]
        there = f"There are: {', '.join(names)}." if names else "The run has none."
        raise AnalysisError(f"no rescoring {score!r}. {there} `slurm-grpo rescore` makes one.")
    parts = {name.removeprefix(part): name for name in known if name.startswith(part)}
    return RewardColumns(reward=reward, error=error, parts=parts)


@dataclass(frozen=True, slots=True)
class Scores:
    """A shard's new rewards, N episodes in its order."""

    reward: Array  # [N] float32, NaN where scoring failed
    parts: dict[str, Array]  # [N] float32 each
    error: Array  # [N] JSON bytes, `null` where scoring succeeded


def list_rescorings(run: RunDir) -> list[Rescoring]:
    """All that were begun, by name. Raises ShardError for a description that is damaged."""
    return [read_description(path) for path in sorted(run.rescored.glob("*/rescoring.json"))]


def description_path(run: RunDir, name: str) -> Path:
    return run.rescored / name / "rescoring.json"


def read_description(path: Path) -> Rescoring:
    """The rescoring that lives beside `path`. Raises ShardError."""
    try:
        body = json.loads(read_whole(path))
        if body["schema"] != SCHEMA:
            raise ShardError(f"{path}: schema {body['schema']!r}, expected {SCHEMA!r}.")
        parts = tuple(str(name) for name in body["part_names"])
        return Rescoring(name=path.parent.name, scorer=dict(body["scorer"]), part_names=parts)
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{path}: damaged: {type(error).__name__}: {error}.") from error


def write_description(run: RunDir, rescoring: Rescoring) -> None:
    """Make the rescoring known, durably; its columns appear with it."""
    path = description_path(run, rescoring.name)
    with storage_errors("create", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema": SCHEMA, "scorer": rescoring.scorer, "part_names": rescoring.part_names}
    write_durably(path, json.dumps(body, indent=1).encode() + b"\n")


def write_scores(
    path: Path, shard: ShardName, episode_ids: Sequence[int], results: Sequence[ScoreResult]
) -> None:
    """Store one result per episode of `shard`, whole or not at all."""
    names = sorted({name for result in results for name in result.parts})
    rewards = [np.nan if r.error is not None else r.reward for r in results]
    parts = [[r.parts.get(name, np.nan) for name in names] for r in results]
    columns = {
        "episode_id": np.array(episode_ids, "i8"),
        "reward": np.array(rewards, "f4"),
        "reward_parts": np.array(parts, "f4").reshape(len(results), len(names)),
        "error": np.array([json.dumps(r.error) for r in results], TEXT),
    }
    with h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False) as file:
        for name, values in columns.items():
            # Text lies in the file's heap, out of a checksum's reach.
            checked = bool(values.size) and name != "error"
            file.create_dataset(name, data=values, fletcher32=checked or None)
        file["reward_parts"].attrs["names"] = np.array(names, TEXT)
        file.attrs["schema"] = SCHEMA
        file.attrs["shard"] = shard.file_name
        file.attrs["complete"] = 1
        file.flush()
        image = bytes(file.id.get_file_image())
    write_durably(path, image)


def read_scores(path: Path, shard: ShardName, episode_ids: Array) -> Scores:
    """What `write_scores` stored. Raises ShardError when it is damaged or of another shard, and
    FileNotFoundError when there is none."""
    with shard_errors(path), h5py.File(path, "r", locking=False) as file:
        if file.attrs.get("schema") != SCHEMA or file.attrs.get("complete") != 1:
            raise ShardError("no finished file of rescored episodes")
        if file.attrs["shard"] != shard.file_name:
            raise ShardError(f"made from {file.attrs['shard']}")
        if not np.array_equal(file["episode_id"][()], episode_ids):
            raise ShardError("its rows are other episodes than the shard's")
        parts = file["reward_parts"][()]
        return Scores(
            reward=file["reward"][()],
            parts={str(n): parts[:, i] for i, n in enumerate(file["reward_parts"].attrs["names"])},
            error=file["error"][()],
        )


def rescored_columns(run: RunDir) -> dict[str, TableColumn]:
    """The columns that rescorings add to the table of episodes, by name; missing where a shard has
    not been rescored."""
    found: dict[str, TableColumn] = {}
    for rescoring in list_rescorings(run):
        name, by, folder = rescoring.name, rescoring.scorer["name"], run.rescored / rescoring.name
        for part in (None, *rescoring.part_names):
            column = name + (REWARD if part is None else PART + part)
            what = f"Reward by {by}" if part is None else f"Reward part {part} by {by}"
            found[column] = TableColumn(partial(_rewards, folder, part), what)
        what = f"Why {by} failed; missing: it did not"
        found[name + ERROR] = TableColumn(partial(_errors, folder), what)
    return found


def _rewards(folder: Path, part: str | None, shard: OpenShard, rows: Array) -> Array:
    """New rewards, or one of their parts."""
    scores = _scores(folder, shard)
    if scores is None or (part is not None and part not in scores.parts):
        return np.full(len(rows), np.nan, "f4")
    return (scores.reward if part is None else scores.parts[part])[rows]


def _errors(folder: Path, shard: OpenShard, rows: Array) -> Array:
    scores, found = _scores(folder, shard), np.full(len(rows), None, object)
    if scores is not None:
        found[:] = decode(scores.error[rows])
    return found


def _scores(folder: Path, shard: OpenShard) -> Scores | None:
    """The shard's scores, read once while it is open; None when there are none to be trusted."""
    path = folder / shard.entry.name.file_name
    if path not in shard.kept:
        shard.kept[path] = None
        try:
            shard.kept[path] = read_scores(path, shard.entry.name, shard["episodes/episode_id"])
        except FileNotFoundError:
            pass  # published, or merged, since
        except ShardError as error:
            logger.warning("left out: %s", error)
    scores: Scores | None = shard.kept[path]
    return scores
