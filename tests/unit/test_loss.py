"""The clipped loss and its statistics, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slurm_grpo.algorithms.loss import LossStats, TokenBatch, policy_loss, token_stats
from slurm_grpo.config.schema import AlgorithmConfig

ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.28)


def tokens(ratios: list[float], advantages: list[float], weights: list[float]) -> TokenBatch:
    return TokenBatch(
        generator_logprobs_N=-torch.tensor(ratios).log(),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights),
    )


def gradient(ratio: float, advantage: float) -> float:
    logprobs = torch.zeros(1, requires_grad=True)
    policy_loss(logprobs, tokens([ratio], [advantage], [1.0]), ALGORITHM, 1).backward()
    assert logprobs.grad is not None
    return logprobs.grad.item()


def test_inside_the_clip_the_gradient_is_minus_ratio_times_advantage() -> None:
    assert gradient(1.1, 2.0) == pytest.approx(-2.2)
    assert gradient(0.9, -2.0) == pytest.approx(1.8)


def test_clip_removes_the_gradient_only_where_the_policy_has_moved_far_enough() -> None:
    assert gradient(1.29, 1.0) == 0.0
    assert gradient(0.79, -1.0) == 0.0
    assert gradient(1.29, -1.0) == pytest.approx(1.29)
    assert gradient(0.79, 1.0) == pytest.approx(-0.79)


def test_upper_clip_is_higher_than_the_lower_one() -> None:
    assert gradient(1.27, 1.0) == pytest.approx(-1.27)


def test_loss_is_divided_by_the_step_wide_count_and_filler_has_no_weight() -> None:
    batch = tokens([1.0, 1.0, 5.0], [1.0, 3.0, 9.0], [1.0, 1.0, 0.0])
    assert policy_loss(torch.zeros(3), batch, ALGORITHM, 10).item() == pytest.approx(-0.4)


def stats_of(logprobs: Tensor, batch: TokenBatch, *, chunk: int) -> dict[str, float]:
    stats = LossStats(torch.device("cpu"))
    for start in range(0, len(logprobs), chunk):
        part = batch.slice(start, start + chunk)
        ours = logprobs[start : start + chunk]
        loss = policy_loss(ours, part, ALGORITHM, len(logprobs))
        stats.add(*token_stats(ours, torch.ones_like(ours), part, ALGORITHM, loss))
    return stats.metrics()


def test_statistics_are_means_and_maxima_over_trained_tokens() -> None:
    batch = tokens([2.0, 0.5, 1.0, 9.0], [1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0])
    stats = stats_of(torch.zeros(4), batch, chunk=4)
    assert stats["trainer/ratio_mean"] == pytest.approx(3.5 / 3)
    assert stats["trainer/ratio_max"] == pytest.approx(2.0)
    assert stats["trainer/clip_fraction"] == pytest.approx(2 / 3)
    assert stats["trainer/entropy_nats"] == pytest.approx(1.0)
    assert stats["trainer/mismatch_max_nats"] == pytest.approx(math.log(2))
    k3 = (2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))
    assert stats["trainer/mismatch_k3_nats"] == pytest.approx(k3 / 3)


def test_statistics_do_not_depend_on_the_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (torch.rand(12, generator=generator) + 0.5).tolist()
    batch = tokens(ratios, torch.randn(12, generator=generator).tolist(), [1.0] * 12)
    whole = stats_of(torch.zeros(12), batch, chunk=12)
    assert stats_of(torch.zeros(12), batch, chunk=5) == pytest.approx(whole)


def test_statistics_of_no_tokens_are_not_numbers() -> None:
    stats = LossStats(torch.device("cpu")).metrics()
    assert math.isnan(stats["trainer/entropy_nats"])
    assert stats["trainer/loss"] == 0.0
