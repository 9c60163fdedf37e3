"""The clipped policy-gradient loss and what is measured along with it. Pure: tensors in, tensors
out.

The loss of a step is a sum over its trained tokens divided by their *global* number, so that it
does not depend on how the step is cut into micro-batches and ranks; the statistics are sums and
maxima for the same reason. Knows nothing of models, packs or process groups.

Axes: N trained tokens (of one chunk), K statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurm_grpo.config.schema import AlgorithmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """What the loss needs to know of each token beside the trainer's own log-probability."""

    generator_logprobs_N: Tensor  # float32, nats, as sampled
    advantages_N: Tensor  # float32
    weights_N: Tensor  # float32, 1 for a trained token, 0 for filler

    def slice(self, start: int, stop: int) -> TokenBatch:
        return TokenBatch(
            generator_logprobs_N=self.generator_logprobs_N[start:stop],
            advantages_N=self.advantages_N[start:stop],
            weights_N=self.weights_N[start:stop],
        )


class LossStats:
    """Sums and maxima over trained tokens, to be added up over micro-batches and reduced over
    ranks.
    """

    SUMS = ("loss", "n_tokens", "ratio", "clipped", "entropy", "k3")
    MAXIMA = ("ratio", "logprob_difference")

    def __init__(self, device: torch.device) -> None:
        self.sums_K = torch.zeros(len(self.SUMS), dtype=torch.float64, device=device)
        self.maxima_K = torch.zeros(len(self.MAXIMA), dtype=torch.float64, device=device)

    def add(self, sums_K: Tensor, maxima_K: Tensor) -> None:
        """Take in one chunk's statistics, in the order of `SUMS` and `MAXIMA`."""
        self.sums_K += sums_K
        self.maxima_K = torch.maximum(self.maxima_K, maxima_K)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens seen, and maxima; NaN when there were none. The loss is the step's
        (already a mean).
        """
        sums = dict(zip(self.SUMS, self.sums_K.tolist(), strict=True))
        maxima = dict(zip(self.MAXIMA, self.maxima_K.tolist(), strict=True))
        n = sums["n_tokens"] or float("nan")
        return {
            "trainer/loss": sums["loss"],
            "trainer/ratio_mean": sums["ratio"] / n,
            "trainer/ratio_max": maxima["ratio"],
            "trainer/clip_fraction": sums["clipped"] / n,
            "trainer/entropy_nats": sums["entropy"] / n,
            "trainer/mismatch_k3_nats": sums["k3"] / n,
            "trainer/mismatch_max_nats": maxima["logprob_difference"],
        }


def policy_loss(
    trainer_logprobs_N: Tensor,
    tokens: TokenBatch,
    algorithm: AlgorithmConfig,
    n_trained_tokens: int,
) -> Tensor:
    """The chunk's share of the step's loss, a scalar: minus the sum of clipped objectives over
    `n_trained_tokens`.

    Per token min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio =
    exp(trainer - generator log-probability): GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3, without
    its KL term) with the asymmetric clip and the per-token normalisation of DAPO (arXiv 2503.14476,
    "clip-higher" and "token-level loss"). `n_trained_tokens` is counted over all micro-batches and
    ranks of the step. Both log-probabilities are at the sampling temperature.
    """
    ratio_N = torch.exp(trainer_logprobs_N - tokens.generator_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    objective_N = torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
    return -(objective_N * tokens.weights_N).sum() / n_trained_tokens


@torch.no_grad()
def token_stats(
    trainer_logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: TokenBatch,
    algorithm: AlgorithmConfig,
    loss: Tensor,
) -> tuple[Tensor, Tensor]:
    """One chunk's `LossStats.SUMS` and `LossStats.MAXIMA`, float64.

    `clipped` counts tokens whose gradient the clip removes. `k3` is the estimator exp(d) - 1 - d of
    KL(generator || trainer), d = trainer - generator log-probability, unbiased, never negative and
    of low variance (John Schulman, "Approximating KL divergence", 2020).
    """
    weights_N = tokens.weights_N.double()
    difference_N = (trainer_logprobs_N - tokens.generator_logprobs_N).double()
    ratio_N = difference_N.exp()
    clipped_N = torch.where(
        tokens.advantages_N > 0,
        ratio_N > 1.0 + algorithm.clip_high,
        (ratio_N < 1.0 - algorithm.clip_low) & (tokens.advantages_N < 0),
    )
    k3_N = torch.expm1(difference_N) - difference_N
    sums = [loss.double(), weights_N.sum()]
    sums += [(x_N * weights_N).sum() for x_N in (ratio_N, clipped_N, entropy_N, k3_N)]
    maxima = [(x_N * weights_N).max() for x_N in (ratio_N, difference_N.abs())]
    return torch.stack(sums), torch.stack(maxima)
