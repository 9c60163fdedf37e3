"""A run without models for fault tests: one process that publishes, verifies, commits and reads.

The order of the durable operations is that of the roles, and like them an attempt ends at its first
storage error; the next one resumes from the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from sample_episodes import assert_same_groups, make_group, make_header, make_run, mark_saved
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import AlgorithmConfig, Config, StagingConfig
from slurm_grpo.errors import SlurmGrpoError
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.attempt import take_attempt
from slurm_grpo.run.checkpoints import COMPLETE, complete_steps, latest_complete
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import Manifest, load_state, publish_manifest
from slurm_grpo.staging.retention import Retention
from slurm_grpo.staging.shards import ShardRef, publish_groups, read_groups, verify_shard
from slurm_grpo.staging.verify import audit_run
from slurm_grpo.types import Group

GROUPS_PER_STEP = 2
READ_DEADLINE_S = 0.2


def new_run(root: Path, *, keep_steps: int | None = None) -> RunDir:
    run = make_run(root)
    freeze_config(config(keep_steps), run.config)
    return run


def config(keep_steps: int | None) -> Config:
    """Two groups a step, on-policy; all shards are kept, or those of the last steps."""
    keep = StagingConfig(keep="recent", keep_steps=keep_steps) if keep_steps else StagingConfig()
    return Config(algorithm=AlgorithmConfig(groups_per_step=GROUPS_PER_STEP), staging=keep)


def attempt(run: RunDir, n_steps: int, *, keep_steps: int | None = None) -> None:
    """From the last checkpoint to `n_steps`, a checkpoint every second step.

    Raises what the staging layer raises; AssertionError when an episode that is about to be trained
    on is not what was generated.
    """
    number = take_attempt(run)
    start = latest_complete(run) or 0
    write_durably(run.attempt(number).resumed_from, f"{start}\n".encode())
    state = load_state(
        run,
        start,
        strict=True,
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=0,
        deadline_s=READ_DEADLINE_S,
    )
    retention = Retention(config(keep_steps), run, number)
    there = {group.group_id: ref for ref in state.available for group in ref.groups}
    for step in range(start + 1, n_steps + 1):
        first = state.next_group + (step - start - 1) * GROUPS_PER_STEP
        ids = list(range(first, first + GROUPS_PER_STEP))
        ref = there.get(first) or publish(run, ids, step, number)
        verify_shard(run, ref, deadline_s=READ_DEADLINE_S)
        chosen = tuple((group_id, ref.path) for group_id in ids)
        publish_manifest(run, Manifest(step=step, attempt=number, groups=chosen, dropped=()))
        trained_on = read_groups(run, ref, ids, deadline_s=READ_DEADLINE_S)
        assert_same_groups(trained_on, generated(ids, step))
        if step % 2 == 0 or step == n_steps:
            mark_saved(run, step)
            for old in complete_steps(run)[:-2]:
                (run.checkpoint(old) / COMPLETE).unlink()
            retention.apply(step)


def generated(ids: list[int], step: int) -> list[Group]:
    """What the engine makes of these groups for this step, whoever runs it."""
    return [make_group(g, oldest_version=step - 1) for g in ids]


def publish(run: RunDir, ids: list[int], step: int, number: int) -> ShardRef:
    header = make_header(attempt=number, sequence=step)
    return publish_groups(run, generated(ids, step), header)


def attempt_until_done(run: RunDir, n_steps: int, *, keep_steps: int | None = None) -> list[str]:
    """As many attempts as it takes; the errors that ended the others."""
    errors: list[str] = []
    while len(errors) < 5:
        try:
            attempt(run, n_steps, keep_steps=keep_steps)
        except SlurmGrpoError as error:
            errors.append(str(error))
        else:
            return errors
    raise AssertionError(f"does not come to an end: {errors}")


def assert_exactly_once(run: RunDir, n_steps: int) -> None:
    """Every step committed once, every group trained in one of them, nothing lost or damaged."""
    audit = audit_run(run)
    assert audit.findings == []
    assert (audit.n_committed, audit.n_trained) == (n_steps, n_steps * GROUPS_PER_STEP)
