"""The trainer role of a replay: the same loop on the steps that another run took, without engines.

The supervisor starts it instead of `role.py` when `run.replay_of` is set. It waits for nobody: the
steps are that run's committed manifests, its shards get a second name in this run's directory, and
new weights are sent nowhere. Reading, packing, loss, optimizer and checkpoints are `role.py`'s, so
a strict run replayed with its own configuration repeats its losses bit for bit on CPUs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slurm_grpo.algorithms.advantage import group_advantages
from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.control.role_process import RoleContext, run_role
from slurm_grpo.fsio import read_whole, write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.ledger import read_ledger
from slurm_grpo.staging.manifest import Manifest, committed_manifests, publish_manifest
from slurm_grpo.staging.shards import GroupRef, ShardRef, read_ref
from slurm_grpo.trainer.picker import StepPlan
from slurm_grpo.trainer.role import TrainerLoop
from slurm_grpo.types import Group

log = logging.getLogger(__name__)


class RecordedSteps:
    """Plans each step from the source's manifest, and writes the same one for this run."""

    def __init__(self, source: RunDir, run: RunDir, attempt: int) -> None:
        self._source = source
        self._run = run
        self._attempt = attempt
        ledger = read_ledger(source)

        def followed(manifest: Manifest) -> Manifest:
            now = tuple((group, ledger.resolve(path)) for group, path in manifest.groups)
            return replace(manifest, groups=now)

        self._manifests = {m.step: followed(m) for m in committed_manifests(source)}

    def holds(self, step: int) -> bool:
        """Whether the source took this step."""
        return step in self._manifests

    def poll(self, step: int) -> StepPlan:
        """The step as the source took it. Raises ShardError for a shard that is gone or damaged."""
        manifest = self._manifests[step]
        refs = {path: self._adopt(path) for path in dict.fromkeys(p for _, p in manifest.groups)}
        facts = {group.group_id: group for ref in refs.values() for group in ref.groups}
        publish_manifest(self._run, replace(manifest, attempt=self._attempt))
        return StepPlan(
            step=step,
            groups=tuple((facts[group_id], refs[path]) for group_id, path in manifest.groups),
            set_aside=(),
            n_dropped_stale=0,
            n_dropped_no_signal=0,
            n_surplus=0,
            n_rounds=0,
        )

    def _adopt(self, path: str) -> ShardRef:
        """The source's shard, checked, under the same name in this run: a link, or a copy."""
        theirs, ours = self._source.root / path, self._run.root / path
        if not ours.exists():
            try:
                os.link(theirs, ours)
            except OSError:  # another file system, or one without links
                write_durably(ours, read_whole(theirs))
        return read_ref(self._run, path)


class ReplayLoop(TrainerLoop):
    """`TrainerLoop` with recorded steps, and nobody to send weights to."""

    def __init__(self, context: RoleContext) -> None:
        cfg = context.config
        assert cfg.run.replay_of is not None
        self._source = RunDir(Path(cfg.run.replay_of))
        recorded = read_frozen(self._source.config).algorithm.advantage
        self._is_estimated_anew = cfg.algorithm.advantage != recorded
        self._recorded: RecordedSteps | None = None  # rank 0
        self._is_over = False
        super().__init__(context)

    def _make_picker(self) -> RecordedSteps:
        self._client.send("begin", next_group=0, n_dropped=0, consumed=[], available=[], spare=0)
        self._recorded = RecordedSteps(self._source, self._context.run, self._context.attempt)
        return self._recorded

    def _poll(self, step: int) -> tuple[str, StepPlan | None]:
        assert self._recorded is not None
        if not self._recorded.holds(step):
            log.info("%s took %d steps: the replay is over", self._source.root, step - 1)
            self._is_over = True
            return "stop", None
        return super()._poll(step)

    def _read(self, of_all_ranks: Sequence[tuple[GroupRef, ShardRef]]) -> list[Group]:
        groups = super()._read(of_all_ranks)
        if not self._is_estimated_anew:
            return groups
        return [with_advantages(group, self._cfg) for group in groups]

    def _send(self, version: int) -> dict[str, float]:
        return {}

    def _finish(self, status: str) -> None:
        super()._finish("done" if self._is_over else status)


def with_advantages(group: Group, cfg: Config) -> Group:
    """The group with its rewards turned into advantages as `algorithm.advantage` says."""
    good = [e for e in group if e.error is None and e.reward is not None]
    rewards = np.array([e.reward for e in good], dtype=np.float32)
    values = group_advantages(rewards, cfg.algorithm.advantage)
    by_index = {e.sample_index: float(v) for e, v in zip(good, values, strict=True)}
    return [replace(e, advantage=by_index.get(e.sample_index)) for e in group]


def main() -> None:
    """Entry point of `python -m slurm_grpo.trainer.replay`."""
    run_role(lambda context: ReplayLoop(context).run())


if __name__ == "__main__":
    main()
