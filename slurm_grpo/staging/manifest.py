"""Manifests, and what a resume may build on.

Trainer rank 0 publishes the manifest of a step before it trains on it; `load_state` derives from
manifests and shards where a new attempt stands. The rule (architecture.md): a step s of attempt a
is committed, and an episode of version v valid, if and only if s, respectively v, is at most
`resumed_from` of every later attempt. Knows nothing of the model or of how groups are picked.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurm_grpo.algorithms.rounds import HISTORY_STEPS, n_to_ask
from slurm_grpo.errors import ShardError
from slurm_grpo.fsio import (
    link_durably,
    read_whole,
    retry_transient,
    storage_errors,
    sweep_temporaries,
)
from slurm_grpo.run.checkpoints import read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.shards import (
    GroupRef,
    ShardRef,
    list_shards,
    quarantine_shard,
    read_ref,
)

logger = logging.getLogger(__name__)

SCHEMA = "slurm_grpo.manifest/1"
RESUME_DEADLINE_S = 5.0
"""Left-over shards are old names: only a stale view of another host's last write may pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The groups that one step of one attempt trains on. Immutable once published."""

    step: int
    attempt: int
    groups: tuple[tuple[int, str], ...]  # (group id, shard path relative to the run directory)
    dropped: tuple[int, ...]  # groups given up while this step was picked, for whatever reason
    stale: tuple[int, ...] = ()  # those of `dropped` that came too late
    surplus: tuple[int, ...] = ()  # those of `dropped` that were useful and not needed

    @property
    def usefulness(self) -> tuple[int, int]:
        """Groups that could be trained on, and those that were looked at."""
        useful = len(self.groups) + len(self.surplus)
        return useful, len(self.groups) + len(self.dropped) - len(self.stale)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """Where an attempt that starts from `resume_step` stands."""

    next_group: int
    """All groups below are consumed or dropped; from it on, those that are neither are wanted."""
    n_dropped: int
    consumed: frozenset[int]
    dropped: frozenset[int]
    available: list[ShardRef]
    """By lowest group id; no group twice; `groups` of a ref holds the usable ones only."""
    history: tuple[tuple[int, int], ...] = ()
    """`Manifest.usefulness` of the last steps, as `n_to_ask` takes it."""


def publish_manifest(run: RunDir, manifest: Manifest) -> Path:
    """Commit to a step's groups, durably; repeating the same manifest is harmless.

    Raises ShardError when this attempt is stale: a later one has begun, or another process that
    takes itself for the same attempt has published other groups for the step.
    """
    path = run.manifests / f"step_{manifest.step:06d}-attempt_{manifest.attempt:03d}.json"
    later = [n for n in run.attempt_numbers() if n > manifest.attempt]
    if later:
        raise ShardError(
            f"publish {path}: attempt {manifest.attempt} is stale, attempt {later[-1]} has begun. "
            "End this process; the later attempt continues the run."
        )
    if not link_durably(path, json.dumps({"schema": SCHEMA} | asdict(manifest)).encode() + b"\n"):
        raise ShardError(
            f"publish {path}: exists with other groups, so another process runs as attempt "
            f"{manifest.attempt}. End one of them."
        )
    return path


def read_manifest(path: Path) -> Manifest:
    """Read one manifest. Raises ShardError naming the file and what is wrong with it."""
    try:
        body = json.loads(read_whole(path))
        if body["schema"] != SCHEMA:
            raise ShardError(f"manifest {path}: schema {body['schema']!r}, expected {SCHEMA!r}.")
        return Manifest(
            step=int(body["step"]),
            attempt=int(body["attempt"]),
            groups=tuple((int(g), str(shard)) for g, shard in body["groups"]),
            dropped=tuple(int(g) for g in body["dropped"]),
            stale=tuple(int(g) for g in body.get("stale", ())),
            surplus=tuple(int(g) for g in body.get("surplus", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"manifest {path}: damaged: {type(error).__name__}: {error}.") from error


def list_manifests(run: RunDir) -> list[tuple[Path, int, int]]:
    """Every manifest file with the step and the attempt in its name, by step, then attempt."""
    if not run.manifests.is_dir():
        return []
    with storage_errors("list", run.manifests):
        names = sorted(os.listdir(run.manifests))
    matches = [re.fullmatch(r"step_(\d+)-attempt_(\d+)\.json", name) for name in names]
    return [(run.manifests / m[0], int(m[1]), int(m[2])) for m in matches if m is not None]


def last_valid(attempt: int, starts: Mapping[int, int]) -> int | None:
    """Last step or version of `attempt` that every later one built on; None: all of them count.

    `starts` maps an attempt to the step it started from.
    """
    return min((start for n, start in starts.items() if n > attempt), default=None)


def load_state(
    run: RunDir,
    resume_step: int,
    *,
    strict: bool,
    groups_per_step: int,
    max_staleness: int,
    oversample: float = 1.0,
    deadline_s: float = RESUME_DEADLINE_S,
) -> ResumeState:
    """Derive the prompt cursor and the reusable shards for an attempt starting from `resume_step`.

    Called by trainer rank 0 before any group is assigned. Sweeps what killed writers left behind.
    Damaged left-over shards are quarantined with a warning; a damaged or missing committed manifest
    raises ShardError, since guessing would repeat or skip prompts.
    """
    for directory in (run.episodes, run.manifests):
        sweep_temporaries(directory)
    starts = read_resumed_from(run)
    committed = committed_manifests(run, resume_step, deadline_s=deadline_s)
    consumed = frozenset(g for m in committed for g, _ in m.groups)
    dropped = frozenset(g for m in committed for g in m.dropped)
    done = consumed | dropped
    next_group = next(g for g in range(len(done) + 1) if g not in done)

    history = tuple(m.usefulness for m in committed[-HISTORY_STEPS:])
    first_round = n_to_ask(groups_per_step, history, oversample)
    window = range(next_group, next_group + first_round)
    available: list[ShardRef] = []
    taken = set(done)
    for path, name in list_shards(run):
        if name.version < resume_step - max_staleness:
            continue  # every group in it is too old; most shards of a long run end here, unopened
        ref = _read_or_quarantine(run, path, deadline_s)
        if ref is None:
            continue
        last = _limit(ref.attempt, starts, resume_step)

        def usable(group: GroupRef, last: int = last) -> bool:
            fresh = resume_step - group.oldest_version <= max_staleness
            return fresh and group.newest_version <= last and group.group_id not in taken

        groups = tuple(g for g in ref.groups if usable(g))
        if strict and (
            len(groups) < len(ref.groups) or any(g.group_id not in window for g in groups)
        ):
            continue
        if groups:
            available.append(replace(ref, groups=groups))
            taken.update(g.group_id for g in groups)
    available.sort(key=lambda ref: min(g.group_id for g in ref.groups))
    return ResumeState(
        next_group=next_group,
        n_dropped=len(dropped),
        consumed=consumed,
        dropped=dropped,
        available=available,
        history=history,
    )


def committed_manifests(
    run: RunDir,
    last_step: int | None = None,
    *,
    deadline_s: float = RESUME_DEADLINE_S,
    read: Callable[[Path], Manifest] = read_manifest,
) -> list[Manifest]:
    """One manifest per step 1..last_step (None: the newest committed one), in order.

    Looks again, up to `deadline_s`, for one that a listing does not show yet. Raises ShardError
    when one is missing, damaged or contradicts another.
    """

    def look() -> list[Manifest]:
        starts = read_resumed_from(run)
        limit = sys.maxsize if last_step is None else last_step
        by_step: dict[int, Manifest] = {}
        for path, step, attempt in list_manifests(run):
            if step > _limit(attempt, starts, limit):
                continue
            manifest = read(path)
            if (manifest.step, manifest.attempt) != (step, attempt) or step in by_step:
                raise ShardError(f"manifest {path}: contradicts its name or another of this step.")
            by_step[step] = manifest
        stop = max(by_step, default=0) if last_step is None else last_step
        missing = [s for s in range(1, stop + 1) if s not in by_step]
        if missing:
            raise FileNotFoundError(
                errno.ENOENT,
                f"no committed manifest of step {missing[0]} ({len(missing)} missing up to "
                f"{stop}). Restore them, or resume from a checkpoint before that step",
            )
        return [by_step[s] for s in sorted(by_step)]

    return retry_transient(look, run.manifests, deadline_s)


def _limit(attempt: int, starts: Mapping[int, int], resume_step: int) -> int:
    """Last step or version of `attempt` that all later ones, and one starting from `resume_step`,
    built on."""
    last = last_valid(attempt, starts)
    return resume_step if last is None else min(resume_step, last)


def _read_or_quarantine(run: RunDir, path: str, deadline_s: float) -> ShardRef | None:
    try:
        return read_ref(run, path, deadline_s=deadline_s)
    except ShardError as error:
        quarantine_shard(run, path, str(error))
        return None
