"""The nouns that every stage shares: completion, episode, group. numpy only, so that a laptop can
import them.

Engines make completions, scorers and advantage estimators fill episodes in, staging stores groups,
trainers read them back. Nothing here knows vLLM, torch, HDF5 or Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What an episode starts from. A pure function of (task, run seed, group id)."""

    task: str
    text: str
    """The exact text that was tokenised, chat template applied."""
    token_ids: Int32Array  # [Lp] int32
    target: Any
    """The right answer as the scorer wants it; JSON-serialisable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returned for one prompt. L tokens. Written once, by the engine."""

    token_ids: Int32Array  # [L] int32
    logprobs: Float32Array  # [L] float32, nats, of the distribution sampled from
    policy_versions: Int32Array  # [L] int32, non-decreasing
    finish_reason: FinishReason
    """`length`: cut short, so a reward judges a fragment."""
    text: str
    t_submit: float  # Unix seconds
    t_first_token: float  # Unix seconds
    t_finish: float  # Unix seconds

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"completion columns differ in length: {sorted(lengths)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One rollout. Unscored while `reward is None`; the advantage needs the group's rewards."""

    group_id: int
    sample_index: int  # 0 .. G-1 inside the group
    sample_seed: int
    prompt: Prompt
    """The same object for every episode of a group."""
    completion: Completion
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function; empty when scoring failed."""
    advantage: float | None = None
    error: str | None = None
    """Why scoring failed; such an episode has reward 0.0, finish reason `error` on disk, and is
    never trained on."""

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token, which staleness is counted from."""
        return int(self.completion.policy_versions[0])


Group: TypeAlias = list[Episode]
"""The G episodes of one prompt, by sample index."""
