"""Which shards a run directory holds, and which of their groups count.

Between the files of a run and the tables of `frame.py`. Promises that of all copies of a group at
most one counts, by the rule of `staging/manifest.py`, and that a shard or manifest that cannot be
read is named, once, and left out. Reads no more of a shard than its group ids and versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import h5py
import numpy as np

from slurm_grpo.errors import AnalysisError, ShardError, StorageError
from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging import layout
from slurm_grpo.staging.layout import Array
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.staging.manifest import Manifest, last_valid, list_manifests, read_manifest
from slurm_grpo.staging.shards import ShardName, list_shards, open_shard

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One readable shard: P groups, N episodes."""

    path: str
    """Relative to the run directory."""
    name: ShardName
    group_ids: Array  # [P] int64
    episode_offsets: Array  # [P+1] int64
    part_names: tuple[str, ...]
    steps: Array  # [P] int64, the committed step that trained on the group; 0: none
    superseded: Array
    """[P] bool: made by an attempt whose work a later one went back over, or another copy of the
    group counts."""


@dataclass(slots=True)
class RunIndex:
    """A run's shards and committed manifests as they were when it was opened."""

    run: RunDir
    shards: list[ShardEntry] = field(default_factory=list)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """Of the committed steps, ascending."""
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong, by path of each shard or manifest that could not be read."""
    n_gone: int = 0
    """Groups that a committed step trained on and that no readable shard holds: retired, or in a
    damaged one."""

    def read(self, path: str, action: Callable[[h5py.File], T]) -> T | None:
        """`action` of the open shard at `path`; None when it is damaged, which is logged once, or
        when a live run has retired it meanwhile."""
        try:
            with open_shard(self.run.root / path) as file:
                return action(file)
        except (StorageError, OSError) as error:
            gone = isinstance(error, FileNotFoundError)
            if not gone or path not in read_ledger(self.run).retired:
                self.skip(path, str(error))
            return None

    def skip(self, path: str, reason: str) -> None:
        """Record and log that a file is left out."""
        if path not in self.damaged:
            self.damaged[path] = reason
            logger.warning("left out: %s", reason)


def read_index(root: Path) -> RunIndex:
    """Look through the run directory `root`. Raises AnalysisError when it is none."""
    run = RunDir(root)
    if not run.episodes.is_dir():
        raise AnalysisError(
            f"{root}: no run directory, it has no {run.episodes.name}/. Give the directory that "
            "holds the run's config.yaml, such as runs/<name>."
        )
    index = RunIndex(run)
    starts = read_resumed_from(run)
    for file, step, attempt in list_manifests(run):
        limit = last_valid(attempt, starts)
        if limit is None or step <= limit:
            try:
                index.manifests[step] = read_manifest(file)
            except StorageError as error:
                index.skip(str(file.relative_to(run.root)), str(error))
    trained = _trained_groups(index)
    for path, name in list_shards(run):
        limit = last_valid(name.attempt, starts)
        entry = _read_entry(index, path, name, limit, trained)
        if entry is not None:
            index.shards.append(entry)
    _keep_one_copy(index.shards)
    n_found = sum(int((s.steps > 0).sum()) for s in index.shards)
    index.n_gone = sum(len(m.groups) for m in index.manifests.values()) - n_found
    return index


def _trained_groups(index: RunIndex) -> Mapping[str, dict[int, int]]:
    """By shard path, the step that trained on each of its groups."""
    ledger = read_ledger(index.run)
    trained: dict[str, dict[int, int]] = {}
    for step, manifest in index.manifests.items():
        for group_id, path in manifest.groups:
            trained.setdefault(ledger.resolve(path), {})[group_id] = step
    return trained


def _read_entry(
    index: RunIndex,
    path: str,
    name: ShardName,
    limit: int | None,
    trained: Mapping[str, Mapping[int, int]],
) -> ShardEntry | None:
    """The entry of one shard, None when it is damaged; `limit` is its attempt's last version."""

    def read(file: h5py.File) -> ShardEntry:
        size_bytes = (index.run.root / path).stat().st_size
        if size_bytes != name.size_bytes:
            raise ShardError(f"has {size_bytes} of {name.size_bytes} bytes")
        group_ids = layout.read_column(file, "groups/group_id")
        offsets = layout.read_column(file, "groups/episode_offsets")
        steps = np.array([trained.get(path, {}).get(g, 0) for g in group_ids.tolist()], "i8")
        superseded = np.zeros(len(group_ids), bool)
        if limit is not None and name.version > limit and len(group_ids):
            versions = layout.read_column(file, "episodes/policy_version_max")
            # A replay trains on another run's shards, whose attempts are not its own.
            superseded = (np.maximum.reduceat(versions, offsets[:-1]) > limit) & (steps == 0)
        return ShardEntry(
            path=path,
            name=name,
            group_ids=group_ids,
            episode_offsets=offsets,
            part_names=layout.part_names(file),
            steps=steps,
            superseded=superseded,
        )

    return index.read(path, read)


def _keep_one_copy(shards: list[ShardEntry]) -> None:
    """Mark all but one copy of a group as superseded: the one trained on counts, else the first."""
    if not shards:
        return
    group_ids = np.concatenate([s.group_ids for s in shards])
    superseded = np.concatenate([s.superseded for s in shards])
    untrained = np.concatenate([s.steps == 0 for s in shards])
    order = np.lexsort((untrained, superseded, group_ids))
    is_copy = np.zeros(len(order), bool)
    is_copy[order[1:]] = group_ids[order[1:]] == group_ids[order[:-1]]
    first = 0
    for shard in shards:
        shard.superseded[:] |= is_copy[first : first + len(shard.group_ids)]
        first += len(shard.group_ids)
