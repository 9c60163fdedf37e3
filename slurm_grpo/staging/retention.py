"""Which shards a run no longer needs, and their removal as `staging.keep` says.

Called by trainer rank 0 after each checkpoint, and by `compact.py` to know what is settled. It
promises that nothing goes that a resume from any checkpoint still there could train on, and that
the ledger names a shard before it is removed. A checkpoint is also every rank's word that it has
read the steps up to it: all ranks write it together, after their reads.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import StorageError
from slurm_grpo.fsio import storage_errors
from slurm_grpo.run.checkpoints import complete_steps, read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.ledger import read_ledger, record_retired
from slurm_grpo.staging.manifest import Manifest, committed_manifests, last_valid, read_manifest
from slurm_grpo.staging.shards import list_shards, read_ref

logger = logging.getLogger(__name__)


def find_settled(
    run: RunDir,
    step: int,
    max_staleness: int,
    *,
    wanted: Callable[[int | None], bool] = lambda last_used: True,
    read: Callable[[Path], Manifest] = read_manifest,
) -> dict[str, int | None]:
    """Shards that nobody can train on any more once the checkpoint of `step` is complete.

    By path, the last step up to `step` that trained on one of its groups (None: no step did). Only
    shards for which `wanted` says so of that step are opened. One that cannot be read is left out:
    `verify.py` is who complains.
    """
    starts = read_resumed_from(run)
    newest = max(starts, default=-1)
    manifests = committed_manifests(run, step, read=read)
    ledger = read_ledger(run)
    done = {g for m in manifests for g in (*m.dropped, *(group_id for group_id, _ in m.groups))}
    uses = {ledger.resolve(path): m.step for m in manifests for _, path in m.groups}
    return {
        path: uses.get(path)
        for path, name in list_shards(run)
        if wanted(uses.get(path))
        # What the newest attempt's picker still holds goes through its books, too stale or not.
        and (
            (name.version < step - max_staleness and name.attempt < newest)
            or _all_done(run, path, last_valid(name.attempt, starts), done)
        )
    }


def _all_done(run: RunDir, path: str, last: int | None, done: set[int]) -> bool:
    """Each group was trained on or dropped, or is newer than the `last` version of its attempt that
    counts.
    """
    try:
        groups = read_ref(run, path, deadline_s=0).groups
    except StorageError:
        return False
    return all(g.group_id in done or (last is not None and g.newest_version > last) for g in groups)


class Retention:
    """Removes what `staging.keep` lets go. One per attempt, on trainer rank 0."""

    def __init__(self, cfg: Config, run: RunDir, attempt: int) -> None:
        self._staging = cfg.staging
        self._max_staleness = cfg.algorithm.max_staleness
        self._run = run
        self._attempt = attempt
        self._read = functools.cache(read_manifest)

    def apply(self, step: int) -> int:
        """Called once the checkpoint of `step` is complete; how many shards were removed.

        Goes by the oldest checkpoint still there, so that a fall-back to it finds its episodes.
        Raises StorageError naming the file that the file system would not let go.
        """
        if self._staging.keep == "all":
            return 0
        covered = complete_steps(self._run)[0]
        found = find_settled(
            self._run,
            covered,
            self._max_staleness,
            wanted=lambda last_used: not self._keeps(last_used, step),
            read=self._read,
        )
        if not found:
            return 0
        record_retired(self._run, found, step=step, attempt=self._attempt)
        remove_shards(self._run, found)
        logger.info("step %d: retired %d shards", step, len(found))
        return len(found)

    def _keeps(self, last_used: int | None, step: int) -> bool:
        if last_used is None:
            return False
        n_steps = self._staging.keep_steps
        return self._staging.keep == "trained" or n_steps is None or last_used > step - n_steps


def remove_shards(run: RunDir, paths: Iterable[str]) -> None:
    """Unlink shards that the ledger names. Raises StorageError."""
    for path in paths:
        with storage_errors("remove", run.root / path), suppress(FileNotFoundError):
            os.unlink(run.root / path)
