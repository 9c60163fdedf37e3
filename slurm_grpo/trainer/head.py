"""The output head: log-probabilities of given tokens, and the gradient of a per-token loss, in
chunks of positions.

Full logits of a pack in float32 are the largest thing a trainer would hold, so they exist for one
chunk of positions at a time, and loss, statistics and gradients are taken from them before the
next. The whole loop is one forward of one module: FSDP gathers the head's weight once, however many
chunks a rank needs, so ranks need not agree on it.

Axes: N positions (C of a chunk), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slurm_grpo.trainer.titan import Linear

CHUNK_ELEMENTS = 2**25
"""Logits of one chunk: 128 MiB in float32, of which about three copies are alive at once."""

ChunkLoss: TypeAlias = Callable[[Tensor, Tensor, int, int], Tensor]
"""(logprobs_C, entropy_C, start, stop) -> the chunk's scalar share of the loss; differentiated by
`logprobs_C`.
"""


class LossHead(Linear):
    """torchtitan's output layer, asked for a loss instead of logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, chunk_loss: ChunkLoss
    ) -> Tensor:
        """The summed loss, a scalar. Without gradients, `chunk_loss` is only called."""
        apply: Callable[..., Tensor] = _HeadLoss.apply
        return apply(hidden_ND, self.weight, targets_N, temperature, chunk_loss)


class _HeadLoss(torch.autograd.Function):
    """Takes the gradients while a chunk's probabilities are at hand: nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_loss: ChunkLoss,
    ) -> Tensor:
        learns = ctx.needs_input_grad[0]
        total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
        hidden_grads: list[Tensor] = []
        weight_grad_VD: Tensor | None = None
        chunks = _chunks(len(targets_N), weight_VD.shape[0])
        for start, stop in chunks:
            hidden_CD, targets_C = hidden_ND[start:stop], targets_N[start:stop]
            logits_CV = hidden_CD.mm(weight_VD.t()).float()
            if temperature != 1.0:
                logits_CV /= temperature
            logprobs_CV = logits_CV.log_softmax(-1)
            del logits_CV
            probs_CV = logprobs_CV.exp()
            entropy_C = -torch.bmm(probs_CV[:, None, :], logprobs_CV[:, :, None]).flatten()
            logprobs_C = logprobs_CV.gather(1, targets_C[:, None]).squeeze(1)
            del logprobs_CV
            with torch.enable_grad():
                leaf_C = logprobs_C.requires_grad_(learns)
                loss = chunk_loss(leaf_C, entropy_C, start, stop)
            total += loss.detach()
            if not learns:
                continue
            (grad_C,) = torch.autograd.grad(loss, leaf_C)
            logits_grad_CV = _logits_grad(probs_CV, targets_C, grad_C / temperature)
            logits_grad_CV = logits_grad_CV.to(weight_VD.dtype)
            hidden_grads.append(logits_grad_CV.mm(weight_VD))
            part_VD = logits_grad_CV.t().mm(hidden_CD)
            if weight_grad_VD is None:
                # Several chunks are added up in float32.
                weight_grad_VD = part_VD if len(chunks) == 1 else part_VD.float()
            else:
                weight_grad_VD += part_VD
        if weight_grad_VD is not None:
            ctx.save_for_backward(torch.cat(hidden_grads), weight_grad_VD.to(weight_VD.dtype))
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        (scale,) = grad_outputs
        return hidden_grad_ND * scale, weight_grad_VD * scale, None, None, None


def _logits_grad(probs_CV: Tensor, targets_C: Tensor, grad_C: Tensor) -> Tensor:
    """Gradient of the chosen log-probabilities, weighted by `grad_C`; overwrites `probs_CV`."""
    grad_CV = probs_CV.mul_(-grad_C[:, None])
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])


def _chunks(n: int, vocab_size: int) -> list[tuple[int, int]]:
    """(start, stop) of equal chunks whose logits stay within `CHUNK_ELEMENTS`."""
    n_chunks = max(1, -(-n * vocab_size // CHUNK_ELEMENTS))
    size = -(-n // n_chunks)
    return [(start, min(start + size, n)) for start in range(0, n, size)]
