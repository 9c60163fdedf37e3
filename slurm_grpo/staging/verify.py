"""`slurm-grpo episodes verify RUN`: every shard and manifest of a run against each other.

Reads files only, so it may run beside a live run: manifests are listed before the shards they name,
and what is still being written has no name yet. It promises that a run without findings has lost no
published episode that counts, trained no group twice and none out of bound. Attempts that were
killed leave steps and episodes that no longer count, temporaries and extra copies of a group: those
are notes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError, ExitCode, SlurmGrpoError
from slurm_grpo.fsio import TEMPORARY_NAME
from slurm_grpo.run.checkpoints import latest_complete, read_resumed_from
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import RUN_HELP, run_path
from slurm_grpo.staging.ledger import Ledger, read_ledger
from slurm_grpo.staging.manifest import Manifest, last_valid, list_manifests, read_manifest
from slurm_grpo.staging.shards import (
    QUARANTINE,
    GroupRef,
    ShardName,
    ShardRef,
    list_shards,
    read_ref,
)

READ_DEADLINE_S = 5.0
"""Longest wait for a file that a listing showed."""


@dataclass(kw_only=True, slots=True)
class Audit:
    """What an audit saw. `findings` is empty when the run is whole."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Legal, but worth knowing."""
    n_shards: int = 0
    n_groups: int = 0
    n_committed: int = 0
    """Steps that count."""
    n_trained: int = 0
    """Groups those steps trained on."""


def verify_run(run: RunDir) -> list[str]:
    """Everything wrong with the episodes of `run`, a line each; empty when it is whole."""
    return audit_run(run).findings


def audit_run(run: RunDir) -> Audit:
    """Read and check every manifest, shard and ledger record."""
    return _Auditor(run).audit()


class _Auditor:
    """One pass. The order of the listings makes it safe beside a live run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._result = Audit()
        self._starts: dict[int, int] = {}
        self._shards: dict[str, tuple[ShardName, dict[int, GroupRef]]] = {}
        self._unreadable: set[str] = set()
        self._ledger = Ledger(retired={}, merged={}, void=())
        self._cfg = self._read_config()

    def audit(self) -> Audit:
        try:
            saved = latest_complete(self._run) or 0
            manifests = self._read_manifests()
            self._starts = read_resumed_from(self._run)
            self._read_shards()
            self._ledger = read_ledger(self._run)
        except SlurmGrpoError as error:
            self._find(str(error))
            return self._result
        committed = self._check_order(manifests, saved)
        self._check_trained(committed)
        self._check_copies(committed)
        self._look_around()
        return self._result

    def _find(self, text: str) -> None:
        self._result.findings.append(text)

    def _read_manifests(self) -> dict[Path, Manifest]:
        found: dict[Path, Manifest] = {}
        for path, step, attempt in list_manifests(self._run):
            try:
                manifest = read_manifest(path)
            except SlurmGrpoError as error:
                self._find(str(error))
                continue
            if (manifest.step, manifest.attempt) != (step, attempt):
                self._find(
                    f"manifest {path}: holds step {manifest.step} of attempt {manifest.attempt}."
                )
            found[path] = manifest
        return found

    def _read_shards(self) -> None:
        for path, name in list_shards(self._run):
            if self._is_gone(path):
                continue
            try:
                ref = read_ref(self._run, path, deadline_s=READ_DEADLINE_S)
            except SlurmGrpoError as error:
                if not self._is_gone(path):
                    self._find(str(error))
                    self._unreadable.add(path)
                continue
            self._check_shard(ref, name)
            self._shards[path] = name, {g.group_id: g for g in ref.groups}
            self._result.n_groups += len(ref.groups)
        self._result.n_shards = len(self._shards)

    def _is_gone(self, path: str) -> bool:
        """Retired, merged or put in quarantine since it was listed: on a live run, say."""
        if (self._run.root / path).exists():
            return False
        ledger = read_ledger(self._run)
        in_quarantine = (self._run.episodes / QUARANTINE / Path(path).name).exists()
        return in_quarantine or path in ledger.retired or path in ledger.merged

    def _check_shard(self, ref: ShardRef, name: ShardName) -> None:
        newest = max((g.newest_version for g in ref.groups), default=-1)
        if newest != name.version:
            self._find(f"shard {ref.path}: its newest token is of version {newest}.")
        resumed_from = self._run.attempt(ref.attempt).resumed_from
        if not (ref.attempt in self._starts or self._replays or resumed_from.exists()):
            self._find(
                f"shard {ref.path}: attempt {ref.attempt} never began ({resumed_from} is missing)."
            )

    def _check_order(self, manifests: dict[Path, Manifest], saved: int) -> dict[int, Manifest]:
        """The manifests that count, by step, after checking that no step is missing or double."""
        committed: dict[int, Manifest] = {}
        steps: dict[int, list[int]] = defaultdict(list)
        for path, manifest in manifests.items():
            steps[manifest.attempt].append(manifest.step)
            last = last_valid(manifest.attempt, self._starts)
            if last is not None and manifest.step > last:
                continue
            if manifest.step in committed:
                other = committed[manifest.step].attempt
                self._find(f"manifest {path}: attempt {other} has committed this step too.")
            committed[manifest.step] = manifest
        for attempt, found in sorted(steps.items()):
            if attempt not in self._starts:
                resumed_from = self._run.attempt(attempt).resumed_from
                self._find(f"attempt {attempt}: has manifests, but {resumed_from} is missing.")
                continue
            expected = range(self._starts[attempt] + 1, max(found) + 1)
            if gaps := sorted(set(expected) - set(found)):
                self._find(f"attempt {attempt}: no manifest of step {_listed(gaps)}.")
            if early := [s for s in sorted(found) if s <= self._starts[attempt]]:
                self._find(
                    f"attempt {attempt}: manifest of step {_listed(early)}, but it started from "
                    f"step {self._starts[attempt]}."
                )
        if gaps := sorted(set(range(1, max([saved, *committed]) + 1)) - committed.keys()):
            self._find(f"{self._run.manifests}: no committed manifest of step {_listed(gaps)}.")
        self._result.n_committed = len(committed)
        n_replaced = len(manifests) - len(committed)
        if n_replaced:
            self._note(n_replaced, "manifest", "of steps that a later attempt took again")
        return committed

    def _check_trained(self, committed: dict[int, Manifest]) -> None:
        """Each group in one step at most, whole, in bound, and where the manifest says."""
        cfg = self._cfg
        trained: dict[int, int] = {}
        dropped: dict[int, int] = {}
        for step, manifest in sorted(committed.items()):
            where = f"step {step} (attempt {manifest.attempt})"
            if cfg is not None and len(manifest.groups) != cfg.algorithm.groups_per_step:
                self._find(
                    f"{where}: {len(manifest.groups)} groups, not "
                    f"{cfg.algorithm.groups_per_step} (algorithm.groups_per_step)."
                )
            for group_id in manifest.dropped:
                dropped.setdefault(group_id, step)
            for group_id, path in manifest.groups:
                if group_id in trained:
                    self._find(
                        f"{where}: group {group_id} was trained in step "
                        f"{trained[group_id]} already."
                    )
                trained[group_id] = step
                for problem in self._problems(manifest, group_id, path):
                    self._find(f"{where}: group {group_id} of {path}: {problem}.")
        for group_id in sorted(trained.keys() & dropped.keys()):
            self._find(
                f"step {trained[group_id]}: group {group_id} was trained, but step "
                f"{dropped[group_id]} has dropped it."
            )
        self._result.n_trained = len(trained)

    def _problems(self, manifest: Manifest, group_id: int, path: str) -> Iterator[str]:
        now = self._ledger.resolve(path)
        if now in self._unreadable:
            return  # found before
        if now in self._ledger.retired:
            if manifest.step > (covered := self._ledger.retired[now]):
                yield f"retired when the checkpoint of step {covered} was the newest"
            return
        if now not in self._shards:
            moved = self._run.episodes / QUARANTINE / Path(now).name
            yield f"it is in quarantine, {moved}" if moved.exists() else f"{now} is missing"
            return
        name, groups = self._shards[now]
        group = groups.get(group_id)
        if group is None:
            yield f"{now} has no such group"
            return
        starts = {n: s for n, s in self._starts.items() if n <= manifest.attempt}
        last = None if self._replays else last_valid(name.attempt, starts)
        if name.attempt > manifest.attempt and not self._replays:
            yield f"made by attempt {name.attempt}, which had not begun"
        elif last is not None and group.newest_version > last:
            yield (
                f"of version {group.newest_version}, which attempt {name.attempt} lost when a "
                f"later one resumed from step {last}"
            )
        if group.newest_version >= manifest.step:
            yield f"of version {group.newest_version}, which did not exist yet"
        if self._cfg is not None and group.oldest_version >= 0:
            staleness = manifest.step - 1 - group.oldest_version
            bound = self._cfg.algorithm.max_staleness
            if staleness > bound:
                yield f"staleness {staleness}, allowed {bound} (algorithm.max_staleness)"

    def _check_copies(self, committed: dict[int, Manifest]) -> None:
        """A group may be published again by another engine life; one life does it once."""
        trained = {group_id for m in committed.values() for group_id, _ in m.groups}
        copies: dict[int, list[str]] = defaultdict(list)
        n_replaced = 0
        for path, (name, groups) in self._shards.items():
            last = None if self._replays else last_valid(name.attempt, self._starts)
            for group_id, group in groups.items():
                if last is not None and group.newest_version > last:
                    n_replaced += 1
                else:
                    copies[group_id].append(path)
        n_copies = 0
        for group_id, paths in sorted(copies.items()):
            n_copies += len(paths) - 1
            lives = {
                (n.attempt, n.engine_id, n.incarnation) for n in (self._shards[p][0] for p in paths)
            }
            if len(lives) < len(paths):
                self._find(
                    f"group {group_id}: published twice by one engine life: {', '.join(paths)}."
                )
        self._note(len(copies.keys() - trained), "group", "that no step has trained on")
        self._note(n_copies, "group", "published again by another engine life")
        self._note(n_replaced, "group", "of versions that a later attempt took again")
        self._note(len(self._ledger.retired), "shard", "retired, as `staging.keep` says")
        self._note(len(self._ledger.merged), "shard", "merged into larger ones")

    def _look_around(self) -> None:
        """What else lies there."""
        for directory in (self._run.episodes, self._run.manifests):
            names = os.listdir(directory) if directory.is_dir() else []
            n = sum(bool(TEMPORARY_NAME.fullmatch(name)) for name in names)
            self._note(n, "temporary", f"in {directory}: in flight, or left by a killed writer")
        quarantine = self._run.episodes / QUARANTINE
        for path in sorted(quarantine.glob("*.reason.txt")):
            reason = path.read_text(errors="replace").strip()
            self._result.notes.append(f"in quarantine: {path.name.partition('.')[0]}: {reason}")

    def _note(self, n: int, what: str, why: str) -> None:
        if n:
            plural = {"temporary": "temporaries"}.get(what, f"{what}s")
            self._result.notes.append(f"{n} {what if n == 1 else plural} {why}")

    @property
    def _replays(self) -> bool:
        """Its shards are another run's, and so are the attempts that made them."""
        return self._cfg is not None and self._cfg.run.replay_of is not None

    def _read_config(self) -> Config | None:
        try:
            return read_frozen(self._run.config)
        except ConfigError as error:
            self._result.notes.append(f"staleness and groups per step not checked: {error}")
            return None


def _listed(steps: list[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return ", ".join(map(str, steps[:5])) + more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run", type=run_path, metavar="RUN", help=RUN_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Print findings, notes and a summary line; FAILURE if there is any finding."""
    directory = RunDir(arguments.run)
    if not directory.episodes.is_dir():
        raise ConfigError(f"{arguments.run}: no run directory, since it has no episodes/.")
    result = audit_run(directory)
    lines = [
        *(f"finding: {text}" for text in result.findings),
        *(f"note: {text}" for text in result.notes),
        f"{arguments.run}: {result.n_shards} shards with {result.n_groups} groups, "
        f"{result.n_committed} steps trained on {result.n_trained} groups: "
        + (f"{len(result.findings)} finding(s)" if result.findings else "whole"),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return ExitCode.FAILURE if result.findings else ExitCode.OK
