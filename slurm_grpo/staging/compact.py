"""`slurm-grpo episodes compact RUN`: merge the small shards of finished steps into few large ones.

Works on a run that rests; the supervisor's lock keeps a resume out meanwhile. Shards are merged
that no resume can train on, each only with others of the same engine life, so that a merged shard
is a shard like any other, with a true header. It promises that every group reads back as it was,
which is checked on the bytes that were written before a source is given up; and that a kill at any
instant leaves each group in exactly one shard that `list_shards` shows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.errors import ConfigError, ExitCode, ShardError
from slurm_grpo.fsio import (
    storage_errors,
    sweep_temporaries,
    sync_directory,
    write_durably,
)
from slurm_grpo.run.attempt import RunLock
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import RUN_HELP, run_path
from slurm_grpo.staging import layout
from slurm_grpo.staging.layout import COLUMNS, Columns, ShardHeader
from slurm_grpo.staging.ledger import read_ledger, record_merged
from slurm_grpo.staging.retention import find_settled, remove_shards
from slurm_grpo.staging.shards import ShardName, checked_shard, list_shards, shard_errors
from slurm_grpo.staging.verify import verify_run

MIB = 1 << 20
LARGE_BYTES = 8 * MIB
"""A shard of this size is left as it is."""
TARGET_BYTES = 32 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A shard as it was read, whole and checked."""

    path: str
    header: ShardHeader
    columns: Columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """What one call did."""

    n_merged: int
    n_made: int
    n_left: int
    """Shards that stay as they were: large, alone, or still of use to a resume."""


def compact_run(run: RunDir, *, target_bytes: int = TARGET_BYTES) -> Compaction:
    """Merge what may be merged, into shards of about `target_bytes`.

    Raises ConfigError when a supervisor is at work there or the audit has findings, StorageError
    when the file system refuses; calling it again then goes on where it stopped.
    """
    lock = RunLock(run)
    try:
        lock.acquire()
    except ConfigError as error:
        raise ConfigError(f"compact: the run is live. {error}") from None
    try:
        _finish_interrupted(run)
        if findings := verify_run(run):
            raise ConfigError(
                f"compact {run.root}: the audit has {len(findings)} finding(s), the first: "
                f"{findings[0]} Look at all with `slurm-grpo episodes verify {run.root}`."
            )
        n_merged = n_made = 0
        for batch in _batches(run, _mergeable(run), target_bytes):
            lock.renew()
            _merge(run, batch)
            n_merged += len(batch)
            n_made += 1
        return Compaction(n_merged=n_merged, n_made=n_made, n_left=len(list_shards(run)) - n_made)
    finally:
        lock.release()


def _finish_interrupted(run: RunDir) -> None:
    """Remove what a killed compaction left: merged sources, records of merges that never were."""
    ledger = read_ledger(run)
    remove_shards(run, ledger.merged)
    for record in ledger.void:
        with storage_errors("remove", record.file):
            record.file.unlink()
    sweep_temporaries(run.episodes)


def _mergeable(run: RunDir) -> list[tuple[str, ShardName]]:
    """Small shards that no resume can train on, those of one engine life in a row."""
    step = latest_complete(run)
    if step is None:
        return []
    settled = find_settled(run, step, read_frozen(run.config).algorithm.max_staleness)
    small = [
        (path, name)
        for path, name in list_shards(run)
        if path in settled and name.size_bytes < LARGE_BYTES
    ]
    small.sort(key=lambda s: (s[1].attempt, s[1].engine_id, s[1].incarnation, s[1].sequence))
    return small


def _batches(
    run: RunDir, shards: Sequence[tuple[str, ShardName]], target_bytes: int
) -> Iterator[list[Source]]:
    """Two or more sources each, alike in all of their header but the sequence, no group twice."""
    batch: list[Source] = []
    group_ids: set[int] = set()
    size_bytes = 0
    for path, name in shards:
        source = read_source(run, path)
        if source is None:
            continue
        found = set(source.columns["groups/group_id"].tolist())
        fits = size_bytes + name.size_bytes <= target_bytes and not found & group_ids
        first = batch[0].header if batch else source.header
        if not fits or replace(source.header, sequence=first.sequence) != first:
            if len(batch) > 1:
                yield batch
            batch, group_ids, size_bytes = [], set(), 0
        batch.append(source)
        group_ids |= found
        size_bytes += name.size_bytes
    if len(batch) > 1:
        yield batch


def read_source(run: RunDir, path: str) -> Source | None:
    """A shard whose CRC fits its name; None if a newer program wrote more into it than we read."""
    file_path = run.root / path
    name = ShardName.parse(file_path.name)
    assert name is not None
    with checked_shard(file_path, name.size_bytes, name.crc32) as (file, columns):
        if tuple(file.attrs["schema_version"]) > layout.SCHEMA_VERSION:
            return None
        return Source(path=path, header=layout.read_header(file), columns=columns)


def join_columns(parts: Sequence[Columns]) -> Columns:
    """The groups of all parts, in order. A reward part that one of them lacks is NaN there."""
    names = tuple(sorted({name for part in parts for name in part.part_names}))
    data = {}
    for column in COLUMNS:
        pieces = [part[column.path] for part in parts]
        if column.path == "episodes/reward_parts":
            pieces = [_named_parts(part, names) for part in parts]
        elif column.axis.endswith("+1"):
            ends = np.cumsum([0, *(piece[-1] for piece in pieces)])
            shifted = [p[1:] + end for p, end in zip(pieces, ends[:-1], strict=True)]
            pieces = [np.zeros(1, "i8"), *shifted]
        shape = sum(map(len, pieces)), *pieces[0].shape[1:]
        # Of the column's own type, which knows text and enums; concatenate alone forgets them.
        data[column.path] = np.concatenate(pieces, out=np.empty(shape, column.dtype))
    return Columns(data, names)


def _named_parts(part: Columns, names: tuple[str, ...]) -> layout.Array:
    values = part["episodes/reward_parts"]
    found = np.full((len(values), len(names)), np.nan, "f4")
    for i, name in enumerate(part.part_names):
        found[:, names.index(name)] = values[:, i]
    return found


def _merge(run: RunDir, batch: list[Source]) -> None:
    """One merged shard, compared on disk, in place of its sources."""
    columns = join_columns([source.columns for source in batch])
    image = layout.build_image(columns, batch[0].header)
    into = run.episodes / ShardName.of(columns, batch[0].header, image).file_name

    def check(temporary: Path) -> None:
        _compare(run, batch, temporary, into)
        record_merged(run, [s.path for s in batch], str(into.relative_to(run.root)))

    write_durably(into, image, check=check)  # its name makes the record count
    remove_shards(run, [source.path for source in batch])
    sync_directory(run.episodes)


def _compare(run: RunDir, batch: list[Source], temporary: Path, into: Path) -> None:
    """Raise ShardError unless every source, read again, is in the file bit for bit."""
    with shard_errors(into), h5py.File(temporary, "r", locking=False) as file:
        whole = layout.read_all(file)
        first = first_episode = 0
        for source in batch:
            again = read_source(run, source.path)
            assert again is not None
            n_groups = len(again.columns["groups/group_id"])
            n_episodes = len(again.columns["episodes/episode_id"])
            found = layout.read_slab(file, first, first + n_groups)
            episodes = slice(first_episode, first_episode + n_episodes)
            for path in ("episodes/policy_version_min", "episodes/policy_version_max"):
                found.data[path] = whole[path][episodes]
            for path, values in found.data.items():
                wanted = again.columns[path]
                if path == "episodes/reward_parts":
                    wanted = _named_parts(again.columns, found.part_names)
                if not _same(values, wanted):
                    raise ShardError(f"{path} of {source.path} does not read back as it was")
            first += n_groups
            first_episode += n_episodes


def _same(a: layout.Array, b: layout.Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"{RUN_HELP}; it must not run")


def run(arguments: argparse.Namespace) -> int:
    """Compact, and say what became of how many shards."""
    directory = RunDir(arguments.run)
    if not directory.episodes.is_dir():
        raise ConfigError(f"{arguments.run}: no run directory, since it has no episodes/.")
    before = _size_bytes(directory)
    done = compact_run(directory)
    sys.stdout.write(
        f"{arguments.run}: merged {done.n_merged} shards into {done.n_made}, {done.n_left} left as "
        f"they were; {before / MIB:.1f} MiB before, {_size_bytes(directory) / MIB:.1f} after\n"
    )
    if done.n_made and (directory.episodes / "rescored").exists():
        sys.stdout.write(
            "Rewards that `slurm-grpo rescore` added belong to the shards they came from: call "
            "it again for the merged ones.\n"
        )
    return ExitCode.OK


def _size_bytes(run: RunDir) -> int:
    return sum(name.size_bytes for _, name in list_shards(run))
