"""Turns the rewards of one group into advantages: pure numpy, called by the engine process right
after scoring.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from slurm_grpo.types import Float32Array

STD_EPSILON = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of 0/0."""


def group_advantages(rewards: Float32Array, kind: Literal["std", "mean"]) -> Float32Array:
    """Advantage of each of a group's G episodes relative to the group, [G] float32.

    `std` is the estimator of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): (r - mean) / (std
    + 1e-6) with the population standard deviation. `mean` leaves the division out (Dr. GRPO, arXiv
    2503.20783), so that groups near all-right or all-wrong are not amplified. A group of equal
    rewards gives exact zeros, one without rewards (nothing could be scored) no advantages.
    """
    wide = np.asarray(rewards, dtype=np.float64)
    if not len(wide) or np.ptp(wide) == 0.0:
        # The mean of equal numbers need not equal them in floating point.
        return np.zeros(len(wide), dtype=np.float32)
    centred = wide - wide.mean()
    if kind == "std":
        centred /= wide.std() + STD_EPSILON
    advantages: Float32Array = centred.astype(np.float32)
    return advantages
