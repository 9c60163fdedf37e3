"""The optimizer step: gradients against transformers, and what must not change them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_grpo.config.schema import ScheduleConfig
from slurm_grpo.errors import NonFiniteError
from slurm_grpo.trainer import attention, head
from slurm_grpo.trainer.batching import StepPacks
from slurm_grpo.trainer.learner import Learner, lr_at
from slurm_grpo.types import Group
from tiny_models import Family
from training import (
    copy_weights,
    hf_gradients,
    make_config,
    make_groups,
    reference_gradients,
    relative_difference,
)

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def gradients_of(
    model_dir: Path, groups: list[Group], **trainer: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    learner = Learner(make_config(model_dir, **trainer), CPU)
    stats = learner.compute_gradients(learner.plan(groups))
    return stats["trainer/loss"], hf_gradients(learner)


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3"])
def test_gradient_of_shared_prompts_equals_the_unshared_one_of_transformers(
    family: Family, tiny_model_dir: Callable[[Family], Path]
) -> None:
    path = tiny_model_dir(family)
    groups = make_groups(5)
    loss, ours = gradients_of(path, groups)
    expected_loss, expected = reference_gradients(path, groups, make_config(path).algorithm)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_difference(ours, expected) < 1e-5


def test_groups_without_signal_are_measured_and_counted_but_not_learned_from(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    path = tiny_model_dir("llama")
    groups = make_groups(4)
    groups[1] = [dataclasses.replace(e, advantage=0.0) for e in groups[1]]
    learner = Learner(make_config(path), CPU)
    packs = learner.plan(groups)
    assert (len(packs.learning), len(packs.quiet)) == (1, 1)
    stats = learner.compute_gradients(packs)
    _, expected = reference_gradients(path, groups, learner.cfg.algorithm)
    assert relative_difference(hf_gradients(learner), expected) < 1e-5
    nearly = [[dataclasses.replace(e, advantage=e.advantage or 1e-30) for e in g] for g in groups]
    packs = learner.plan(nearly)
    assert (len(packs.learning), len(packs.quiet)) == (1, 0)
    learned = Learner(make_config(path), CPU).compute_gradients(packs)
    del stats["trainer/clip_fraction"], learned["trainer/clip_fraction"]
    assert stats == pytest.approx(learned, rel=1e-5)


@pytest.mark.parametrize("budget", [24, 48, 96])
def test_gradient_does_not_depend_on_the_split_into_microbatches(
    budget: int, tiny_model_dir: Callable[[Family], Path]
) -> None:
    path = tiny_model_dir("llama")
    groups = make_groups(5)
    loss, whole = gradients_of(path, groups)
    split_loss, split = gradients_of(path, groups, tokens_per_microbatch=budget)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    assert relative_difference(split, whole) < 1e-5


def test_gradient_does_not_depend_on_the_chunks_of_the_head(
    tiny_model_dir: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_dir("llama_untied")
    groups = make_groups(3)
    _, whole = gradients_of(path, groups)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 320 * 7)
    _, chunked = gradients_of(path, groups)
    assert relative_difference(chunked, whole) < 1e-5


def test_gradient_does_not_depend_on_the_blocks_of_attention(
    tiny_model_dir: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_dir("llama")
    groups = make_groups(3)
    _, whole = gradients_of(path, groups)
    monkeypatch.setattr(attention, "MAX_ROWS", 5)
    _, blocks = gradients_of(path, groups)
    assert relative_difference(blocks, whole) < 1e-5


def test_activation_checkpointing_changes_nothing(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    path = tiny_model_dir("qwen3")
    groups = make_groups(2)
    _, plain = gradients_of(path, groups)
    _, recomputed = gradients_of(path, groups, activation_checkpointing=True)
    assert relative_difference(recomputed, plain) < 1e-6


def test_bfloat16_forward_gives_nearly_the_same_gradient_with_float32_masters(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    path = tiny_model_dir("llama")
    groups = make_groups(3)
    _, exact = gradients_of(path, groups)
    _, rounded = gradients_of(path, groups, forward_dtype="bfloat16")
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())
    assert relative_difference(rounded, exact) < 0.1


def test_step_on_the_policys_own_samples_has_ratio_one(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    learner = Learner(make_config(tiny_model_dir("llama")), CPU)
    groups: list[Group] = []
    for group in make_groups(2):
        prompt = group[0].prompt.token_ids.tolist()
        groups.append([])
        for episode in group:
            completion = episode.completion
            logprobs = learner.logprobs([*prompt, *completion.token_ids.tolist()])
            own = torch.tensor(logprobs[len(prompt) - 1 :]).numpy()
            completion = dataclasses.replace(completion, logprobs=own)
            groups[-1].append(dataclasses.replace(episode, completion=completion))
    metrics = learner.train_step(groups)
    assert metrics["trainer/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["trainer/mismatch_max_nats"] < 1e-4
    assert metrics["trainer/clip_fraction"] == 0.0
    assert 0.0 < metrics["trainer/entropy_nats"] < math.log(320)


def test_steps_repeat_bit_for_bit(tiny_model_dir: Callable[[Family], Path]) -> None:
    results = []
    for _ in range(2):
        learner = Learner(make_config(tiny_model_dir("llama")), CPU)
        losses = []
        for step in range(3):
            groups = make_groups(4, seed=step)
            losses.append(learner.train_step(groups)["trainer/loss"])
        results.append((losses, copy_weights(learner)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(t, results[1][1][name]) for name, t in results[0][1].items())


def test_step_equals_one_of_plain_adamw(tiny_model_dir: Callable[[Family], Path]) -> None:
    learner = Learner(make_config(tiny_model_dir("llama")), CPU)
    groups = make_groups(3)
    before = copy_weights(learner)
    learner.compute_gradients(learner.plan(groups))
    grads = {
        name: p.grad.full_tensor()  # type: ignore[union-attr]
        for name, p in learner.model.named_parameters()
    }
    learner.optimizer.zero_grad()
    metrics = learner.train_step(groups)
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    assert metrics["trainer/grad_norm"] == pytest.approx(norm, rel=1e-5)
    lr = learner.cfg.trainer.optimizer.lr / learner.cfg.trainer.schedule.warmup_steps
    assert metrics["trainer/lr"] == pytest.approx(lr)
    after = copy_weights(learner)
    for name in before:
        grad = grads[name] * min(1.0, 1.0 / norm)
        expected = before[name] - lr * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(after[name], expected, atol=1e-7, rtol=0)


def test_step_without_anything_to_learn_changes_nothing(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    learner = Learner(make_config(tiny_model_dir("llama")), CPU)
    before = copy_weights(learner)
    group = [dataclasses.replace(e, error="timed out") for e in make_groups(1)[0]]
    assert learner.plan([group]) == StepPacks(learning=[[]], quiet=[], n_trained_tokens=0)
    metrics = learner.train_step([group])
    assert metrics["trainer/loss"] == 0.0
    assert metrics["trainer/grad_norm"] == 0.0
    assert all(torch.equal(t, before[name]) for name, t in copy_weights(learner).items())


def test_loss_that_is_not_finite_stops_before_the_weights_change(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    learner = Learner(make_config(tiny_model_dir("llama")), CPU)
    before = copy_weights(learner)
    (group,) = make_groups(1)
    group[0] = dataclasses.replace(group[0], advantage=math.nan)
    with pytest.raises(NonFiniteError, match="step 1: loss nan"):
        learner.train_step([group])
    assert all(torch.equal(t, before[name]) for name, t in copy_weights(learner).items())


def test_learning_rate_warms_up_and_decays_as_configured() -> None:
    constant = ScheduleConfig(warmup_steps=2)
    assert [lr_at(s, 1.0, constant, 10) for s in (1, 2, 3, 10)] == [0.5, 1.0, 1.0, 1.0]
    linear = ScheduleConfig(warmup_steps=2, decay="linear", min_lr_ratio=0.1)
    assert [lr_at(s, 1.0, linear, 9) for s in (2, 6, 9)] == pytest.approx([1.0, 0.55, 0.2125])
    cosine = ScheduleConfig(warmup_steps=0, decay="cosine")
    assert lr_at(5, 1.0, cosine, 9) == pytest.approx(0.5)
    assert 0.0 < lr_at(9, 1.0, cosine, 9) < 0.03


@pytest.mark.model
def test_gradient_of_smollm2_with_shared_prompts_equals_its_unpacked_unshared_one(
    smollm2_dir: Path,
) -> None:
    groups = make_groups(4, max_prompt=80, max_tokens=24)
    loss, shared = gradients_of(smollm2_dir, groups)
    learner = Learner(make_config(smollm2_dir), CPU)
    n = learner.plan(groups).n_trained_tokens
    losses = [
        learner.compute_gradients(StepPacks(learning=[[[episode]]], quiet=[], n_trained_tokens=n))[
            "trainer/loss"
        ]
        for group in groups
        for episode in group
    ]
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    assert relative_difference(shared, hf_gradients(learner)) < 1e-5
