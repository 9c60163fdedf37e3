"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_grpo.algorithms.advantage import group_advantages


def test_std_advantages_have_mean_zero_and_unit_spread() -> None:
    advantages = group_advantages(np.array([1, 0, 0, 1, 0, 0, 0, 1], np.float32), "std")
    assert advantages.dtype == np.float32
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std() == pytest.approx(1.0, abs=1e-4)


def test_mean_advantages_keep_the_scale_of_the_rewards() -> None:
    advantages = group_advantages(np.array([3, 1], np.float32), "mean")
    assert advantages.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("kind", ["std", "mean"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_give_exact_zeros(kind: str, reward: float) -> None:
    rewards = np.full(7, reward, np.float32)
    assert not group_advantages(rewards, kind).any()  # type: ignore[arg-type]
