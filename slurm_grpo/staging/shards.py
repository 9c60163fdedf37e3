"""Shards on disk: publish, verify, read, and put aside.

The generator publishes whole groups and announces the returned `ShardRef`; trainer rank 0 verifies
the ref before it enters a manifest; every rank reads its groups from it. A shard that can be seen
under its name is whole: it is written elsewhere, synced and renamed. Knows nothing of steps or of
who asks.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from slurm_grpo.errors import SchemaVersionError, ShardError
from slurm_grpo.fsio import (
    READ_DEADLINE_S,
    ShortRead,
    put_in_place,
    read_whole,
    retry_transient,
    storage_errors,
    sync_directory,
    synced_temporary,
    write_durably,
)
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging import layout
from slurm_grpo.staging.layout import Columns, ShardHeader
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.types import Group

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine"
"""Directory under `episodes/` for damaged shards, each with a `.reason.txt`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRef:
    """What picking and packing need to know of a group without reading it."""

    group_id: int
    n_tokens: int  # prompt once + all completions
    oldest_version: int  # over all its tokens
    newest_version: int  # over all its tokens
    zero_spread: bool
    """All rewards of the trainable episodes are equal: no gradient."""
    n_trainable: int
    """Episodes without an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRef:
    """A published shard: enough to find it, to tell it from a damaged one, and to pick from it."""

    path: str
    """Relative to the run directory."""
    size_bytes: int
    crc32: int
    attempt: int
    engine_id: int
    groups: tuple[GroupRef, ...]
    """In file order; after a resume only those that may still be used."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a control message."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> ShardRef:
        """The inverse of `to_json`."""
        return cls(**{**body, "groups": tuple(GroupRef(**g) for g in body["groups"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardName:
    """What a shard's file name tells, so that a resume opens few of them."""

    version: int  # newest token's version
    engine_id: int
    attempt: int
    incarnation: int
    sequence: int
    crc32: int
    size_bytes: int

    @property
    def file_name(self) -> str:
        return (
            f"v{self.version:06d}-e{self.engine_id:03d}-a{self.attempt:03d}-i{self.incarnation:03d}"
            f"-s{self.sequence:06d}-{self.crc32:08x}-{self.size_bytes}.h5"
        )

    @classmethod
    def parse(cls, file_name: str) -> ShardName | None:
        """None when it is not the name of a shard."""
        match = re.fullmatch(
            r"v(?P<version>-?\d+)-e(?P<engine_id>\d+)-a(?P<attempt>\d+)-i(?P<incarnation>\d+)"
            r"-s(?P<sequence>\d+)-(?P<crc32>[0-9a-f]{8})-(?P<size_bytes>\d+)\.h5",
            file_name,
        )
        if match is None:
            return None
        bases = {"crc32": 16}
        return cls(**{key: int(v, bases.get(key, 10)) for key, v in match.groupdict().items()})

    @classmethod
    def of(cls, columns: Columns, header: ShardHeader, image: bytes) -> ShardName:
        """The name of the shard with these bytes."""
        return cls(
            version=int(columns["episodes/policy_version_max"].max(initial=-1)),
            engine_id=header.engine_id,
            attempt=header.attempt,
            incarnation=header.incarnation,
            sequence=header.sequence,
            crc32=zlib.crc32(image),
            size_bytes=len(image),
        )


def publish_groups(run: RunDir, groups: list[Group], header: ShardHeader) -> ShardRef:
    """Make `groups` one durable shard and return what to announce.

    Raises ShardError when they cannot be stored, StorageError when the file system refuses;
    publishing the same groups again is then safe, under the same `header.sequence` too.
    """
    return publish_columns(run, layout.build_columns(groups), header)


def publish_columns(run: RunDir, columns: Columns, header: ShardHeader) -> ShardRef:
    """`publish_groups` for groups that are columns already."""
    image = layout.build_image(columns, header)
    path = run.episodes / f"e{header.engine_id:03d}-s{header.sequence:06d}.h5"
    with ThreadPoolExecutor(1) as pool:  # names and describes the shard while the disk works
        name = pool.submit(ShardName.of, columns, header, image)
        groups = pool.submit(_group_refs, columns)
        with synced_temporary(path, image) as temporary:
            put_in_place(temporary, run.episodes / name.result().file_name)
    return _ref(run, name.result(), groups.result())


def verify_shard(run: RunDir, ref: ShardRef, *, deadline_s: float = READ_DEADLINE_S) -> None:
    """Check once that the shard is what was announced, before a manifest names it.

    Size, CRC, `complete`, schema, lengths, offsets, finite log-probs, group facts. Raises
    ShardError, naming the file.
    """
    path = run.root / ref.path
    with checked_shard(path, ref.size_bytes, ref.crc32, deadline_s=deadline_s) as (_, columns):
        by_id = {g.group_id: g for g in _group_refs(columns)}
    for announced in ref.groups:
        if by_id.get(announced.group_id) != announced:
            raise ShardError(
                f"shard {path}: announced {announced}, "
                f"the file holds {by_id.get(announced.group_id)}."
            )


def read_ref(run: RunDir, path: str, *, deadline_s: float = READ_DEADLINE_S) -> ShardRef:
    """Rebuild the ref of the shard at `path` (as in a ref), with the checks of `verify_shard`."""
    full = run.root / path
    name = ShardName.parse(full.name)
    if name is None:
        raise ShardError(f"shard {full}: not the name of a shard.")
    with checked_shard(full, name.size_bytes, name.crc32, deadline_s=deadline_s) as (_, columns):
        return _ref(run, name, _group_refs(columns))


def read_groups(
    run: RunDir, ref: ShardRef, group_ids: Sequence[int], *, deadline_s: float = READ_DEADLINE_S
) -> list[Group]:
    """Read the groups asked for, in that order, with one contiguous read per dataset.

    Relies on `verify_shard` having passed on some rank; the token arrays' checksums are checked
    again by HDF5. Raises ShardError when the shard is missing after `deadline_s`, damaged, or lacks
    a group.
    """
    path = run.root / ref.path

    def read() -> list[Group]:
        size_bytes = path.stat().st_size
        if size_bytes < ref.size_bytes:
            raise ShortRead(f"has {size_bytes} of {ref.size_bytes} bytes")
        with open_shard(path) as file:
            index = {int(g): i for i, g in enumerate(file["groups/group_id"][()])}
            missing = [g for g in group_ids if g not in index]
            if missing:
                raise ShardError(f"it has no group {missing}; it has {sorted(index)}")
            wanted = [index[g] for g in group_ids]
            if not wanted:
                return []
            first, stop = min(wanted), max(wanted) + 1
            slab = layout.groups_from(layout.read_slab(file, first, stop))
            return [slab[i - first] for i in wanted]

    return retry_transient(read, path, deadline_s)


@contextmanager
def open_shard(path: Path) -> Iterator[h5py.File]:
    """The published shard at `path`, open for reading, its header checked and nothing else.

    Raises ShardError naming the file for what HDF5, the layout or the block finds wrong with it,
    and passes the file system's own OSErrors on.
    """
    with shard_errors(path), h5py.File(path, "r", locking=False) as file:
        layout.check_header(file)
        yield file


def quarantine_shard(run: RunDir, path: str, reason: str) -> Path:
    """Move a damaged shard aside, next to a file that says why, and return where it is now."""
    source = run.root / path
    target = run.episodes / QUARANTINE / source.name
    with storage_errors("create", target.parent):
        target.parent.mkdir(exist_ok=True)
    write_durably(target.with_suffix(".reason.txt"), f"{reason}\n".encode())
    with storage_errors("move to quarantine", source), suppress(FileNotFoundError):
        os.rename(source, target)  # a shard may be refused for being missing
    sync_directory(source.parent)
    logger.warning("quarantined %s: %s", path, reason)
    return target


def list_shards(run: RunDir) -> list[tuple[str, ShardName]]:
    """Published shards as (path as in a ref, name): by attempt, then incarnation, then sequence.

    Those that compaction has merged into another one are left out, even while they still exist.
    """
    if not run.episodes.is_dir():
        return []
    with storage_errors("list", run.episodes):
        names = [ShardName.parse(n) for n in os.listdir(run.episodes)]
    shards = [n for n in names if n is not None]
    shards.sort(key=lambda n: (n.attempt, n.incarnation, n.sequence, n.engine_id, n.crc32))
    merged = read_ledger(run).merged
    found = [(f"{run.episodes.name}/{n.file_name}", n) for n in shards]
    return [(path, name) for path, name in found if path not in merged]


@contextmanager
def checked_shard(
    path: Path, size_bytes: int, crc32: int, *, deadline_s: float = READ_DEADLINE_S
) -> Iterator[tuple[h5py.File, Columns]]:
    """The whole file, read once and everything about it checked. Raises ShardError naming it."""
    image = read_whole(path, size_bytes, deadline_s=deadline_s)
    if len(image) != size_bytes:
        raise ShardError(f"shard {path}: {len(image)} bytes, announced {size_bytes}.")
    if zlib.crc32(image) != crc32:
        raise ShardError(f"shard {path}: CRC {zlib.crc32(image):08x}, announced {crc32:08x}.")
    with shard_errors(path), h5py.File(h5py.h5f.open_file_image(image)) as file:
        name = ShardName.parse(path.name)
        if name is None:
            raise ShardError("not the name of a shard")
        for key in ("engine_id", "attempt", "incarnation", "sequence"):
            if (said := int(file.attrs[key])) != getattr(name, key):  # renamed, or copied here
                raise ShardError(f"{key} is {said} in the file, {getattr(name, key)} in its name")
        yield file, layout.read_all(file)


@contextmanager
def shard_errors(path: Path) -> Iterator[None]:
    """Name the file in what HDF5 or the layout says of it; let the file system's errors pass."""
    try:
        yield
    except (ShardError, SchemaVersionError) as error:
        raise type(error)(f"shard {path}: {error}.") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ShardError(f"shard {path}: cannot be read: {error}.") from error
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise ShardError(f"shard {path}: damaged: {type(error).__name__}: {error}.") from error


def _ref(run: RunDir, name: ShardName, groups: tuple[GroupRef, ...]) -> ShardRef:
    return ShardRef(
        path=f"{run.episodes.name}/{name.file_name}",
        size_bytes=name.size_bytes,
        crc32=name.crc32,
        attempt=name.attempt,
        engine_id=name.engine_id,
        groups=groups,
    )


def _group_refs(columns: Columns) -> tuple[GroupRef, ...]:
    episodes = columns["groups/episode_offsets"].tolist()
    tokens = columns["episodes/token_offsets"].tolist()
    n_prompt_tokens = np.diff(columns["groups/prompt_offsets"]).tolist()
    finish_reasons = columns["episodes/finish_reason"].tolist()
    rewards = columns["episodes/reward"].tolist()
    oldest = columns["episodes/policy_version_min"].tolist()
    newest = columns["episodes/policy_version_max"].tolist()
    refs = []
    for p, group_id in enumerate(columns["groups/group_id"].tolist()):
        first, stop = episodes[p], episodes[p + 1]
        trainable = [n for n in range(first, stop) if finish_reasons[n] != layout.ERROR_CODE]
        refs.append(
            GroupRef(
                group_id=group_id,
                n_tokens=n_prompt_tokens[p] + tokens[stop] - tokens[first],
                oldest_version=min((v for v in oldest[first:stop] if v >= 0), default=-1),
                newest_version=max(newest[first:stop], default=-1),
                # NaN, a reward not computed, is equal to itself here.
                zero_spread=len({None if isnan(rewards[n]) else rewards[n] for n in trainable}) < 2,
                n_trainable=len(trainable),
            )
        )
    return tuple(refs)
