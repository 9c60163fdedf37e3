"""Small groups of episodes for staging tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import AlgorithmConfig, Config
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.checkpoints import COMPLETE
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.layout import ShardHeader
from slurm_grpo.staging.manifest import Manifest, publish_manifest
from slurm_grpo.staging.shards import ShardRef, publish_groups
from slurm_grpo.types import Completion, Episode, Group, Prompt


def make_run(root: Path) -> RunDir:
    run = RunDir(root)
    run.create()
    return run


def make_header(
    *, attempt: int = 0, engine_id: int = 0, incarnation: int = 0, sequence: int = 0
) -> ShardHeader:
    return ShardHeader(
        run_id="test-run",
        engine_id=engine_id,
        incarnation=incarnation,
        attempt=attempt,
        sequence=sequence,
        model_id="tiny",
        tokenizer_sha256="0" * 64,
        vocab_size=50_000,
        logprobs_mode="processed_logprobs",
        sampling_params_json='{"temperature": 1.0}',
        code_version="test",
        advantage_estimator="std",
    )


def make_group(
    group_id: int,
    *,
    n_episodes: int = 2,
    n_prompt_tokens: int = 5,
    n_tokens: int = 3,
    oldest_version: int = 0,
    newest_version: int | None = None,
) -> Group:
    """Episodes whose every value follows from the arguments; rewards alternate between 0 and 1."""
    rng = np.random.default_rng(group_id)
    prompt = Prompt(
        task="addition",
        text=f"prompt {group_id}",
        token_ids=rng.integers(0, 50_000, n_prompt_tokens).astype(np.int32),
        target=group_id,
    )
    versions = np.full(n_tokens, oldest_version, np.int32)
    versions[-1] = oldest_version if newest_version is None else newest_version

    def episode(index: int) -> Episode:
        return Episode(
            group_id=group_id,
            sample_index=index,
            sample_seed=group_id * 100 + index,
            prompt=prompt,
            completion=Completion(
                token_ids=rng.integers(0, 50_000, n_tokens).astype(np.int32),
                logprobs=-rng.random(n_tokens, np.float32),
                policy_versions=versions,
                finish_reason="stop",
                text=f"completion {index}",
                t_submit=1.0,
                t_first_token=2.0,
                t_finish=3.0,
            ),
            reward=float(index % 2),
            reward_parts={"correct": float(index % 2)},
            advantage=float(index % 2) * 2 - 1,
        )

    return [episode(i) for i in range(n_episodes)]


def make_books(root: Path) -> RunDir:
    """A run directory with a configuration, two groups a step, whose attempt 0 has begun."""
    run = make_run(root)
    freeze_config(Config(algorithm=AlgorithmConfig(groups_per_step=2)), run.config)
    begin_attempt(run, 0, 0)
    return run


def begin_attempt(run: RunDir, attempt: int, resumed_from: int) -> None:
    run.attempt(attempt).root.mkdir()
    write_durably(run.attempt(attempt).resumed_from, f"{resumed_from}\n".encode())


def publish_ids(
    run: RunDir, *ids: int, version: int, header: ShardHeader | None = None, n_tokens: int = 3
) -> str:
    """The path of a shard of these groups, all of one version."""
    groups = [make_group(g, oldest_version=version, n_tokens=n_tokens) for g in ids]
    return publish_groups(run, groups, header or make_header()).path


def commit_step(
    run: RunDir, step: int, path: str, *ids: int, dropped: tuple[int, ...] = ()
) -> None:
    """The newest attempt's manifest of `step`: it trains on `ids` of the shard at `path`."""
    chosen = tuple((group_id, path) for group_id in ids)
    attempt = max(run.attempt_numbers())
    publish_manifest(run, Manifest(step=step, attempt=attempt, groups=chosen, dropped=dropped))


def train_step(run: RunDir, step: int, ref: ShardRef) -> None:
    """The newest attempt's manifest of `step`: it trains on all groups of the shard."""
    commit_step(run, step, ref.path, *(group.group_id for group in ref.groups))


def take_step(run: RunDir, step: int, *ids: int) -> str:
    """An on-policy step of the newest attempt on one shard of `ids`, by default the two next
    groups; the shard's path."""
    ids = ids or (2 * step - 2, 2 * step - 1)
    header = make_header(attempt=max(run.attempt_numbers()), sequence=step)
    path = publish_ids(run, *ids, version=step - 1, header=header)
    commit_step(run, step, path, *ids)
    return path


def mark_saved(run: RunDir, *steps: int) -> None:
    """A checkpoint of each step, as far as file names tell."""
    for step in steps:
        run.checkpoint(step).mkdir(exist_ok=True)
        (run.checkpoint(step) / COMPLETE).touch()


def assert_same_groups(found: Iterable[Group], expected: Iterable[Group]) -> None:
    """Equal in every field; arrays in dtype too."""
    for got, want in zip(found, expected, strict=True):
        assert all(e.prompt is got[0].prompt for e in got)
        for a, b in zip(got, want, strict=True):
            for name in ("group_id", "sample_index", "sample_seed", "reward", "reward_parts"):
                assert getattr(a, name) == getattr(b, name), name
            assert (a.advantage, a.error) == (b.advantage, b.error)
            for name in ("task", "text", "target"):
                assert getattr(a.prompt, name) == getattr(b.prompt, name), name
            _assert_same_array(a.prompt.token_ids, b.prompt.token_ids)
            for name in ("finish_reason", "text", "t_submit", "t_first_token", "t_finish"):
                assert getattr(a.completion, name) == getattr(b.completion, name), name
            for name in ("token_ids", "logprobs", "policy_versions"):
                _assert_same_array(getattr(a.completion, name), getattr(b.completion, name))


def _assert_same_array(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
