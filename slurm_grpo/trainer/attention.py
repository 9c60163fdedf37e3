"""Attention over a pack of groups: every completion sees its group's prompt and itself, and nothing
else.

On CUDA one flex-attention block mask covers the pack. CPUs have no flex-attention backward, and a
dense mask over the pack costs its length squared, so there attention runs group by group over the
pack's segments.

Axes: T tokens of the pack, L of one segment, B batch (always 1), N heads, K key/value heads, R
query heads per key/value head, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slurm_grpo.trainer.titan import FlexAttention, Module, create_attention_mask

PADDING = -1
"""Group number of padding tokens; they see each other, so that no row of the mask is empty."""

MAX_ROWS = 512
"""Query rows whose scores are computed at a time, which bounds the memory of long segments."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One group's part of a pack and its additive mask."""

    start: int
    stop: int
    mask_LL: Tensor  # float32, 0 where the row's token sees the column's, else -inf


PackMask: TypeAlias = tuple[Segment, ...] | BlockMask


def build_pack_mask(
    group_T: Tensor, completion_T: Tensor, segments: tuple[tuple[int, int], ...]
) -> PackMask:
    """The mask of a pack, for the kernel of its device.

    `group_T` numbers the groups (`PADDING` for filler), `completion_T` the completions inside each
    (0: the prompt). `segments` are the (start, stop) of the groups; they cover the pack.
    """
    if group_T.device.type == "cpu":
        return tuple(Segment(a, b, _mask_LL(completion_T[a:b])) for a, b in segments)

    n_tokens = len(group_T)
    mask: BlockMask = create_attention_mask(
        build_visible(group_T, completion_T), 1, None, n_tokens, n_tokens, device=group_T.device
    )
    return mask


def build_visible(group_T: Tensor, completion_T: Tensor) -> Callable[..., Tensor]:
    """Flex attention's rule (batch, head, query, key) of which token sees which."""

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shared = (completion_T[key] == 0) | (completion_T[key] == completion_T[query])
        return (query >= key) & (group_T[query] == group_T[key]) & shared

    return visible


def _mask_LL(completion_L: Tensor) -> Tensor:
    order_L = torch.arange(len(completion_L))
    shared_LL = (completion_L == 0)[None, :] | (completion_L[None, :] == completion_L[:, None])
    visible_LL = shared_LL & (order_L[:, None] >= order_L[None, :])
    return torch.zeros(visible_LL.shape).masked_fill_(~visible_LL, float("-inf"))


class SegmentAttention(Module):
    """torchtitan's inner attention for CPUs: exact attention inside each segment of the pack.

    The argument names are torchtitan's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: tuple[Segment, ...],
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        scale = scale if scale is not None else q_BLNH.shape[-1] ** -0.5
        apply: Callable[..., Tensor] = _SegmentAttention.apply
        return apply(q_BLNH[0], k_BLNH[0], v_BLNH[0], attention_masks, scale).unsqueeze(0)


class _SegmentAttention(torch.autograd.Function):
    """Plain matrix products per segment; the weights are computed again in the backward pass.

    At 200 tokens four times as fast as the fused CPU kernel in bfloat16. Written out because
    autograd would fill a gradient of the whole pack with zeros for every segment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        segments: tuple[Segment, ...],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH)
        ctx.segments, ctx.scale = segments, scale
        out_TNH = torch.empty_like(q_TNH)
        for rows, keys, mask_LL in _blocks(segments):
            weights_KML = _weights(q_TNH[rows], k_TKH[keys], mask_LL, scale).to(v_TKH.dtype)
            out_KMH = torch.bmm(weights_KML, v_TKH[keys].transpose(0, 1))
            _split_heads(out_TNH[rows], k_TKH.shape[1]).copy_(_unmerge(out_KMH, out_TNH[rows]))
        return out_TNH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_TNH, k_TKH, v_TKH = ctx.saved_tensors
        (grad_TNH,) = grad_outputs
        n_kv_heads = k_TKH.shape[1]
        q_grad_TNH = torch.empty_like(q_TNH)
        k_grad_TKH, v_grad_TKH = torch.zeros_like(k_TKH), torch.zeros_like(v_TKH)
        for rows, keys, mask_LL in _blocks(ctx.segments):
            weights_KML = _weights(q_TNH[rows], k_TKH[keys], mask_LL, ctx.scale)
            grad_KMH = _merge(grad_TNH[rows], n_kv_heads)
            v_grad_KLH = torch.bmm(weights_KML.to(v_TKH.dtype).transpose(1, 2), grad_KMH)
            v_grad_TKH[keys] += v_grad_KLH.transpose(0, 1)
            weights_grad_KML = torch.bmm(grad_KMH, v_TKH[keys].permute(1, 2, 0)).float()
            scores_grad_KML = torch._softmax_backward_data(
                weights_grad_KML, weights_KML, -1, torch.float32
            )
            scores_grad_KML = scores_grad_KML.mul_(ctx.scale).to(q_TNH.dtype)
            q_grad_KMH = torch.bmm(scores_grad_KML, k_TKH[keys].transpose(0, 1))
            _split_heads(q_grad_TNH[rows], n_kv_heads).copy_(_unmerge(q_grad_KMH, q_TNH[rows]))
            q_KMH = _merge(q_TNH[rows], n_kv_heads)
            k_grad_KLH = torch.bmm(scores_grad_KML.transpose(1, 2), q_KMH)
            k_grad_TKH[keys] += k_grad_KLH.transpose(0, 1)
        return q_grad_TNH, k_grad_TKH, v_grad_TKH, None, None


def _blocks(segments: tuple[Segment, ...]) -> Iterator[tuple[slice, slice, Tensor]]:
    """(query rows, key rows, their mask) of every segment, long ones in several blocks of rows."""
    for segment in segments:
        for start in range(0, segment.stop - segment.start, MAX_ROWS):
            stop = min(start + MAX_ROWS, segment.stop - segment.start)
            keys = slice(segment.start, segment.start + stop)
            rows = slice(segment.start + start, segment.start + stop)
            yield rows, keys, segment.mask_LL[start:stop, :stop]


def _weights(q_LNH: Tensor, k_LKH: Tensor, mask_LL: Tensor, scale: float) -> Tensor:
    """Attention weights [K, M, L] float32; M counts the rows of all query heads of a key head."""
    n_kv_heads = k_LKH.shape[1]
    scores_KML = torch.bmm(_merge(q_LNH, n_kv_heads), k_LKH.permute(1, 2, 0)).float()
    scores_KRLL = scores_KML.mul_(scale).view(n_kv_heads, -1, *mask_LL.shape)
    return scores_KRLL.add_(mask_LL).softmax(-1).view(scores_KML.shape)


def _split_heads(x_LNH: Tensor, n_kv_heads: int) -> Tensor:
    """View as [K, R, L, H]: R query heads share a key head."""
    return x_LNH.view(x_LNH.shape[0], n_kv_heads, -1, x_LNH.shape[2]).permute(1, 2, 0, 3)


def _merge(x_LNH: Tensor, n_kv_heads: int) -> Tensor:
    return _split_heads(x_LNH, n_kv_heads).reshape(n_kv_heads, -1, x_LNH.shape[2])


def _unmerge(x_KMH: Tensor, like_LNH: Tensor) -> Tensor:
    return x_KMH.view(x_KMH.shape[0], -1, like_LNH.shape[0], x_KMH.shape[2])


def inner_attention_config(device: torch.device) -> Module.Config:
    """The inner attention of every layer on `device`, in torchtitan's terms."""
    if device.type == "cpu":
        return SegmentAttention.Config()
    # Autotuning takes minutes per shape, and picks kernels by timing: runs would not repeat.
    FlexAttention.inductor_configs.update(max_autotune=False, coordinate_descent_tuning=False)
    FlexAttention._compiled_flex_attn = torch.compile(
        flex_attention, options=dict(FlexAttention.inductor_configs)
    )
    return FlexAttention.Config()
