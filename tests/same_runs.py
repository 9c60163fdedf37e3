"""What a run trained on, and whether two runs are the same run."""

from __future__ import annotations

import numpy as np

from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import read_run_metrics
from slurm_grpo.staging.manifest import Manifest, read_manifest
from slurm_grpo.staging.shards import read_groups, read_ref
from slurm_grpo.types import Group


def manifests(run: RunDir) -> list[Manifest]:
    return [read_manifest(path) for path in sorted(run.manifests.glob("*.json"))]


def trained_groups(run: RunDir) -> dict[int, Group]:
    """By group id, what the last manifest of each step trained on."""
    last = {m.step: m for m in sorted(manifests(run), key=lambda m: (m.step, m.attempt))}
    found: dict[int, Group] = {}
    for manifest in last.values():
        for group_id, path in manifest.groups:
            ref = read_ref(run, path)
            found[group_id] = read_groups(run, ref, [group_id])[0]
    return found


def assert_trained_once(run: RunDir, n_groups: int) -> None:
    """Every group in exactly one step of the run as it counts."""
    last = {m.step: m for m in sorted(manifests(run), key=lambda m: (m.step, m.attempt))}
    ids = [group_id for m in last.values() for group_id, _ in m.groups]
    assert len(ids) == len(set(ids)) == n_groups


def losses(run: RunDir) -> dict[int, float]:
    return {
        r["step"]: r["trainer/loss"]
        for r in read_run_metrics(run, "trainer")
        if "trainer/loss" in r
    }


def assert_same_run(run: RunDir, reference: RunDir) -> None:
    """Bit for bit in token ids, log-probabilities, versions, rewards, advantages and losses."""
    assert losses(run) == losses(reference)
    ours, theirs = trained_groups(run), trained_groups(reference)
    assert ours.keys() == theirs.keys()
    for group_id, group in theirs.items():
        for mine, other in zip(ours[group_id], group, strict=True):
            for column in ("token_ids", "logprobs", "policy_versions"):
                a, b = getattr(mine.completion, column), getattr(other.completion, column)
                assert np.array_equal(a, b), (group_id, mine.sample_index, column)
            assert (mine.reward, mine.advantage) == (other.reward, other.advantage)
