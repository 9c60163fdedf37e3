"""What became of published shards that are no longer there: retired by retention, or merged by
compaction.

Manifests are immutable and go on naming the shard a group was published in. A record is durable
before any shard it names is removed, so that a name without a file is either explained here or a
loss. Used by whoever follows such a name; knows nothing of what shards hold.

A merge takes effect when the file it made gets its name: until then its record is void, from then
on its sources no longer count, whether or not they have been removed yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_grpo.errors import ShardError
from slurm_grpo.fsio import link_durably, read_whole, storage_errors
from slurm_grpo.run.directory import RunDir

SCHEMA = "slurm_grpo.ledger/1"
DIRECTORY = "ledger"
"""Under `episodes/`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Why some shards go. Paths are relative to the run directory, as in manifests."""

    shards: tuple[str, ...]
    into: str | None
    """The merged shard that holds their groups; None: retired."""
    step: int | None
    """Of retired ones: the checkpoint that had just been written."""
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """All records that are in force."""

    retired: dict[str, int]  # path -> step of the checkpoint after which it went
    merged: dict[str, str]  # source -> the shard that took its place, perhaps merged again since
    void: tuple[Record, ...]
    """Merges that were interrupted before they took effect."""

    def resolve(self, path: str) -> str:
        """Where the groups of the shard published as `path` are now."""
        while path in self.merged:
            path = self.merged[path]
        return path


def record_retired(run: RunDir, shards: Iterable[str], *, step: int, attempt: int) -> None:
    """Durably say that `shards` go now that there is a checkpoint of `step`."""
    _publish(run, f"retired-step_{step:06d}-attempt_{attempt:03d}.json", sorted(shards), step=step)


def record_merged(run: RunDir, shards: Sequence[str], into: str) -> None:
    """Durably say that `shards` go once `into` has its name."""
    _publish(run, f"merged-{Path(into).stem}.json", list(shards), into=into)


def read_ledger(run: RunDir) -> Ledger:
    """Every record, sorted into those in force and those that are void. Raises ShardError."""
    directory = run.episodes / DIRECTORY
    if not directory.is_dir():
        return Ledger(retired={}, merged={}, void=())
    with storage_errors("list", directory):
        names = sorted(n for n in os.listdir(directory) if n.endswith(".json") and n[0] != ".")
    records = [_read(directory / name) for name in names]
    retired = {p: r.step for r in records if r.step is not None for p in r.shards}
    merges = {r.into: r for r in records if r.into is not None}
    later = {p: into for into, r in merges.items() for p in r.shards}

    def in_force(into: str) -> bool:
        if into in retired or (run.root / into).exists():
            return True
        return into in later and in_force(later[into])

    good = {into: r for into, r in merges.items() if in_force(into)}
    return Ledger(
        retired=retired,
        merged={p: into for into, r in good.items() for p in r.shards},
        void=tuple(r for into, r in merges.items() if into not in good),
    )


def _publish(
    run: RunDir, name: str, shards: list[str], *, into: str | None = None, step: int | None = None
) -> None:
    directory = run.episodes / DIRECTORY
    with storage_errors("create", directory):
        directory.mkdir(exist_ok=True)
    body = {"schema": SCHEMA, "shards": shards, "into": into, "step": step}
    if not link_durably(directory / name, json.dumps(body).encode() + b"\n"):
        raise ShardError(
            f"publish {directory / name}: exists with other shards, so two processes clean up this "
            "run. End one of them."
        )


def _read(path: Path) -> Record:
    try:
        body = json.loads(read_whole(path))
        if body["schema"] != SCHEMA:
            raise ShardError(f"ledger {path}: schema {body['schema']!r}, expected {SCHEMA!r}.")
        into, step = body["into"], body["step"]
        return Record(
            shards=tuple(str(p) for p in body["shards"]),
            into=None if into is None else str(into),
            step=None if step is None else int(step),
            file=path,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"ledger {path}: damaged: {type(error).__name__}: {error}.") from error
