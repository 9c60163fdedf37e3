"""Pick the groups of a step: in order, in bound, whole; write the step's manifest before anybody
trains on it.

Runs on trainer rank 0 only. What it waits for are announcements in the control plane's view;
engines unblock it. It drops groups that are too stale or carry no signal and tells the scheduler,
together with how many more to assign. In strict mode groups come in rounds, each judged when all of
it is there, so that neither what is generated nor what is chosen depends on who finishes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from slurm_grpo.algorithms.rounds import HISTORY_STEPS, n_to_ask
from slurm_grpo.config.schema import Config
from slurm_grpo.control.client import ControlClient, who_is_missing
from slurm_grpo.errors import DeadlineExceeded, ShardError, SlurmGrpoError
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import Manifest, ResumeState, publish_manifest
from slurm_grpo.staging.shards import GroupRef, ShardRef, quarantine_shard, verify_shard

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The groups one step trains on, in training order, each with the shard that holds it."""

    step: int
    groups: tuple[tuple[GroupRef, ShardRef], ...]
    set_aside: tuple[tuple[GroupRef, ShardRef], ...]
    """Groups of this step's policies that it was not trained on, without a signal or surplus: what
    the policy earns is the mean over these and `groups`."""
    n_dropped_stale: int
    n_dropped_no_signal: int
    n_surplus: int
    """Useful groups that this step did not need and the next could not use any more."""
    n_rounds: int
    """How often groups were asked for, the first time included."""


class StepSource(Protocol):
    """Where the plans of the steps come from."""

    def poll(self, step: int) -> StepPlan | None:
        """The step's plan, its manifest written, or None while groups are missing."""


class Picker:
    """Holds the cursor over group ids and what was verified. One `poll` at a time."""

    def __init__(
        self, cfg: Config, run: RunDir, attempt: int, client: ControlClient, state: ResumeState
    ) -> None:
        self._cfg = cfg
        self._run = run
        self._attempt = attempt
        self._client = client
        self._next_group = state.next_group
        self._history = list(state.history)
        self._round_stop = len(state.consumed | state.dropped)
        """Strict mode: the first group beyond the round that is being generated."""
        self._n_rounds = 1
        self._verdicts: dict[str, bool] = {}
        """Whether a shard, by path, is intact, as long as the view shows it: a damaged one may
        still be there for a moment."""
        self._done: set[int] = set(state.consumed | state.dropped)
        """Groups consumed or dropped; the view may still show them for a moment."""
        self._dropped: dict[int, str] = {}
        self._set_aside: list[tuple[GroupRef, ShardRef]] = []
        self._waiting_since: float | None = None

    def poll(self, step: int) -> StepPlan | None:
        """The step's plan if all its groups are there, else None. Writes the manifest and tells the
        scheduler.

        Raises `DeadlineExceeded` when the step has waited for longer than
        `trainer.wait_for_groups_s`, and `SlurmGrpoError` when it has dropped so many groups that it
        will hardly ever fill.
        """
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        available = self._announced(step)
        chosen = list(self._choose(available))
        needed = self._cfg.algorithm.groups_per_step
        if len(chosen) < needed:
            self._check_patience(step, now, len(chosen))
            return None
        chosen = chosen[:needed]
        ids = [group.group_id for group, _ in chosen]
        rest = [pair for g, pair in available.items() if g not in set(ids)]
        surplus = {
            group.group_id: "surplus" for group, _ in rest if self._is_stale(group, step + 1)
        }
        self._drop(surplus, available)
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            groups=tuple((group.group_id, ref.path) for group, ref in chosen),
            dropped=tuple(sorted(self._dropped)),
            stale=self._dropped_for("stale"),
            surplus=self._dropped_for("surplus"),
        )
        publish_manifest(self._run, manifest)
        plan = StepPlan(
            step=step,
            groups=tuple(chosen),
            set_aside=tuple(sorted(self._set_aside, key=lambda pair: pair[0].group_id)),
            n_dropped_stale=len(manifest.stale),
            n_dropped_no_signal=len(self._dropped_for("no signal")),
            n_surplus=len(manifest.surplus),
            n_rounds=self._n_rounds,
        )
        self._history = [*self._history, manifest.usefulness][-HISTORY_STEPS:]
        self._settle(step, ids, sorted(surplus), len(rest) - len(surplus))
        self._start_step()
        return plan

    def first_spare(self, version: int, available: Iterable[ShardRef]) -> int:
        """The `spare` of the attempt's first round, which `available` shards are a part of."""
        groups = [group for ref in available for group in ref.groups]
        kept = [g for g in groups if self._reason_to_drop(g, version + 1) is None]
        return self._spare(version, 0 if self._cfg.strict_mode else len(kept))

    def _spare(self, version: int, n_kept: int) -> int:
        """Groups that engines with `version` may be given beyond what the steps that can train on
        them still miss, since so many are expected to be dropped; `version` steps are done, and
        `n_kept` groups are there for the next. Strict mode: begins a round.
        """
        algorithm = self._cfg.algorithm
        if algorithm.order == "ready" and not algorithm.max_staleness:
            return 0  # the rest of a round would still be in the engines when the weights change
        steps = min(version + 1 + algorithm.max_staleness, self._cfg.run.steps)
        missing = algorithm.groups_per_step * (steps - version) - n_kept
        n = n_to_ask(missing, self._history, algorithm.oversample)
        self._round_stop += n
        return max(0, n - missing)

    def _settle(self, version: int, ids: list[int], dropped: list[int], n_kept: int) -> None:
        """These groups are trained on, those dropped: the scheduler hears of it, and of what
        engines with `version` may be asked for in their place.
        """
        spare = self._spare(version, n_kept)
        self._client.send("consumed", version=version, group_ids=ids, dropped=dropped, spare=spare)
        self._done.update(ids, dropped)

    def _start_step(self) -> None:
        """Forget what only the step that was picked needed."""
        self._dropped = {}
        self._set_aside = []
        self._waiting_since = None
        self._n_rounds = 1
        while self._next_group in self._done:
            self._done.discard(self._next_group)
            self._next_group += 1

    def _drop(self, reasons: dict[int, str], pairs: dict[int, tuple[GroupRef, ShardRef]]) -> None:
        """Note groups as dropped, each for its reason; `pairs` holds them, among others."""
        self._dropped |= reasons
        self._set_aside += [pairs[g] for g, reason in reasons.items() if reason != "stale"]

    def _dropped_for(self, reason: str) -> tuple[int, ...]:
        return tuple(sorted(g for g, why in self._dropped.items() if why == reason))

    def _announced(self, step: int) -> dict[int, tuple[GroupRef, ShardRef]]:
        """Usable groups in the order of their announcement; drops what cannot be trained on."""
        usable: dict[int, tuple[GroupRef, ShardRef]] = {}
        shards = self._client.view["shards"]
        self._verdicts = {path: good for path, good in self._verdicts.items() if path in shards}
        for row in shards.values():
            ref = ShardRef.from_json(row)
            wanted = [
                g
                for g in ref.groups
                if g.group_id >= self._next_group and g.group_id not in self._done
            ]
            if wanted and self._intact(ref):
                usable.update({group.group_id: (group, ref) for group in wanted})
        if self._cfg.strict_mode and not all(
            g in usable or g in self._done for g in range(self._next_group, self._round_stop)
        ):
            return {}  # judge the round once it is whole: order of arrival is immaterial
        newly_dropped = {
            group.group_id: reason
            for group, _ in usable.values()
            if (reason := self._reason_to_drop(group, step))
        }
        if newly_dropped:
            self._drop(newly_dropped, usable)
            usable = {g: pair for g, pair in usable.items() if g not in newly_dropped}
            self._settle(step - 1, [], sorted(newly_dropped), len(usable))
            self._n_rounds += len(usable) < self._cfg.algorithm.groups_per_step
        return usable

    def _intact(self, ref: ShardRef) -> bool:
        if ref.path not in self._verdicts:
            try:
                verify_shard(self._run, ref)
                self._verdicts[ref.path] = True
            except ShardError as error:
                log.warning("shard refused, its groups are generated again: %s", error)
                self._verdicts[ref.path] = False
                quarantine_shard(self._run, ref.path, str(error))
                self._client.send("lost", group_ids=[group.group_id for group in ref.groups])
        return self._verdicts[ref.path]

    def _reason_to_drop(self, group: GroupRef, step: int) -> str | None:
        if self._is_stale(group, step):
            return "stale"
        if group.n_trainable == 0 or (self._cfg.algorithm.drop_zero_spread and group.zero_spread):
            return "no signal"
        return None

    def _is_stale(self, group: GroupRef, step: int) -> bool:
        return step - 1 - group.oldest_version > self._cfg.algorithm.max_staleness

    def _choose(
        self, usable: dict[int, tuple[GroupRef, ShardRef]]
    ) -> Iterator[tuple[GroupRef, ShardRef]]:
        if self._cfg.algorithm.order == "ready":
            yield from usable.values()
            return
        group_id = self._next_group
        while group_id in usable or group_id in self._done:
            if group_id in usable:
                yield usable[group_id]
            group_id += 1

    def _check_patience(self, step: int, now: float, n_there: int) -> None:
        algorithm = self._cfg.algorithm
        if len(self._dropped) > algorithm.max_dropped_per_step:
            raise SlurmGrpoError(
                f"step {step}: {len(self._dropped)} groups were dropped and only {n_there} of "
                f"{algorithm.groups_per_step} kept. Rewards that are equal in every group teach "
                "nothing: check the scorer and the task's difficulty, set "
                "algorithm.drop_zero_spread to false, or raise algorithm.max_dropped_per_step "
                f"(now {algorithm.max_dropped_per_step})."
            )
        waited = now - (self._waiting_since or now)
        if waited > self._cfg.trainer.wait_for_groups_s:
            raise DeadlineExceeded(
                f"step {step}: {n_there} of {algorithm.groups_per_step} groups after "
                f"{waited:.0f} s. {who_is_missing(self._client.view)}Start with the engine logs in "
                f"attempts/{self._attempt}/, or raise trainer.wait_for_groups_s."
            )
