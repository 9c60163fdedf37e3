"""The trained weights layer by layer, whole, in the engine's dtype and under Hugging Face names.

Collective: every rank iterates in lockstep and gets every tensor. A full state dict never exists.
Used by the weight sender (rank 0) and the Hugging Face export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slurm_grpo.trainer import titan
from slurm_grpo.trainer.model import units
from slurm_grpo.weights.layout import Metadata


@torch.no_grad()
def iter_hf_layers(
    model: nn.Module, adapter: titan.StateDictAdapter, dtype: torch.dtype
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield embeddings, each layer, final norm and head as (name, full tensor) lists, in forward
    order.

    A tied head is not sent: it is the embeddings. Shards are cast to `dtype` before they are
    gathered; a tensor that one rank holds whole comes in its own dtype.
    """
    for unit in units(model):
        whole = {name: _gather(tensor, dtype) for name, tensor in unit.items()}
        yield list(adapter.to_hf(whole).items())


def hf_metadata(model: nn.Module, adapter: titan.StateDictAdapter, dtype: torch.dtype) -> Metadata:
    """(name, dtype, full shape) of what `iter_hf_layers` yields, in its order; moves no data."""
    rows: Metadata = []
    for unit in units(model):
        shapes = {
            name: torch.empty(tensor.shape, dtype=dtype, device="meta")
            for name, tensor in unit.items()
        }
        rows += [(name, dtype, tuple(t.shape)) for name, t in adapter.to_hf(shapes).items()]
    return rows


def _gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        local: Tensor = tensor.to_local()
        return local
    cast: Any = tensor.to(dtype)
    whole: Tensor = cast.full_tensor()
    return whole
