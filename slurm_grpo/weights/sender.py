"""Sends the policy's weights from trainer rank 0 to every engine worker over the policy group.

Gathered layers arrive one by one; large tensors are broadcast from where they lie and small ones
packed into buckets, while the next layer is gathered. On a GPU a full copy of the model never
exists here. On a CPU it does, since digests computed beside a broadcast would stop the threads that
send: there they wait until the last byte has left, and so does what they are computed from.
Knows nothing about models: it takes tensors and their metadata.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slurm_grpo.config.schema import WeightSyncConfig
from slurm_grpo.errors import SlurmGrpoError, SyncError
from slurm_grpo.weights.layout import (
    LINE_BYTES,
    Layout,
    Metadata,
    TensorSlot,
    bucket_digest,
    digest_text,
)
from slurm_grpo.weights.policy_group import Pipeline, PolicyGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SendResult:
    """One complete transfer, as the sender saw it. It counts once every receiver has acknowledged
    the digest.
    """

    digest: str
    """Hexadecimal, over all buckets; equal on both sides."""
    n_bytes: int
    gather_s: float
    """Seconds spent waiting for `layers`."""
    broadcast_s: float
    """Seconds of casting, packing, sending and digests that `gather_s` did not cover."""


class WeightSender:
    """Keeps the layout and the buckets of small tensors between transfers."""

    def __init__(self, cfg: WeightSyncConfig) -> None:
        self._cfg = cfg
        self._layout: tuple[Metadata, Layout] | None = None
        self._buffers: list[Tensor] = []

    def send(
        self,
        group: PolicyGroup,
        layers: Iterable[list[tuple[str, Tensor]]],
        metadata: Metadata,
        version: int,
    ) -> SendResult:
        """Broadcast one version. `layers` yields full tensors in the order and shapes of
        `metadata`, whose dtypes they are cast to.

        Tensors may be sent without a copy: leave them unchanged until this returns. Every receiver
        must already be at the door of the same epoch. When a broadcast fails, `layers` is still
        exhausted (the other trainer ranks gather in lockstep), the group is abandoned, and
        SyncError or DeadlineExceeded is raised.
        """
        started = time.monotonic()
        layout = self._layout_of(metadata)
        stream = _Stream(
            group,
            layout,
            self._take_buffers(group.device, layout),
            started + self._cfg.transfer_timeout_s,
        )
        gather_s = 0.0
        remaining = iter(layers)
        done = False
        try:
            stream.open(version)
            while True:
                before = time.monotonic()
                layer = next(remaining, None)
                gather_s += time.monotonic() - before
                if layer is None:
                    break
                for name, tensor in layer:
                    stream.write(name, tensor)
            digests = stream.close()
            done = True
        except SlurmGrpoError:
            for _ in remaining:
                pass
            raise
        finally:
            if done:
                self._buffers = stream.buffers
            else:
                group.abandon()  # with the buffers: a pending operation may still read them
        return SendResult(
            digest=digest_text(digests),
            n_bytes=layout.n_bytes,
            gather_s=gather_s,
            broadcast_s=time.monotonic() - started - gather_s,
        )

    def _layout_of(self, metadata: Metadata) -> Layout:
        if self._layout is None or self._layout[0] != metadata:
            self._layout = (list(metadata), Layout(metadata, self._cfg.bucket_mib << 20))
        return self._layout[1]

    def _take_buffers(self, device: torch.device, layout: Layout) -> list[Tensor]:
        """Three on a GPU: two may be under way while the third is filled. On a CPU one for every
        packed bucket.
        """
        buffers, self._buffers = self._buffers, []
        size = layout.bucket_bytes
        n = 3 if device.type == "cuda" else -(-(layout.n_bytes - layout.packed_start) // size)
        if len(buffers) < n or any(buffer.device != device for buffer in buffers):
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(n)]
        return buffers


class _Stream:
    """Takes tensors and broadcasts every bucket as soon as it is whole."""

    def __init__(
        self, group: PolicyGroup, layout: Layout, buffers: list[Tensor], deadline: float
    ) -> None:
        self.buffers = buffers
        self._group = group
        self._layout = layout
        self._deadline = deadline
        self._n_written = 0  # tensors written so far
        self._pipeline = Pipeline(group, 2 * layout.bucket_bytes, deadline)
        self._keeps_data = group.device.type != "cuda"
        self._sent: list[Tensor] = []  # the buckets themselves, or only their digests

    def open(self, version: int) -> None:
        encoded = bytearray(self._layout.encoded)
        header = torch.tensor([version, len(encoded), self._layout.bucket_bytes], dtype=torch.int64)
        for tensor in (header, torch.frombuffer(encoded, dtype=torch.uint8)):
            self._group.broadcast(tensor.to(self._group.device), deadline=self._deadline)

    def write(self, name: str, tensor: Tensor) -> None:
        if self._n_written == len(self._layout.slots):
            raise SyncError(
                f"weights: {name} comes after the last of {self._n_written} announced tensors."
            )
        slot = self._layout.slots[self._n_written]
        if (name, tuple(tensor.shape)) != (slot.name, slot.shape):
            raise SyncError(
                f"weights: tensor {self._n_written} is {name} {tuple(tensor.shape)}, but "
                f"{slot.name} {slot.shape} was announced. Gather in the order of the metadata."
            )
        self._n_written += 1
        values = tensor.detach().to(self._group.device).reshape(-1)
        if slot.is_direct:
            data = values.to(slot.dtype).view(torch.uint8)
            if data.storage_offset() % 8:
                data = data.clone()  # digests read it as int64
            for piece in data.split(self._layout.bucket_bytes):
                self._send(piece)
        else:
            self._pack(values, slot)

    def close(self) -> Tensor:
        """Send the digests; returns them once everything has been sent."""
        if self._n_written != len(self._layout.slots):
            missing = [s.name for s in self._layout.slots[self._n_written :]]
            raise SyncError(
                f"weights: {len(missing)} announced tensors were not gathered, first {missing[0]}."
            )
        for _ in self._pipeline.drain():
            pass
        digests = torch.stack([bucket_digest(b) if self._keeps_data else b for b in self._sent])
        self._group.broadcast(digests, deadline=self._deadline)
        return digests

    def _pack(self, values: Tensor, slot: TensorSlot) -> None:
        """Cast a small tensor into the packed part of the stream."""
        layout, offset = self._layout, slot.offset
        while len(values):
            bucket, used = divmod(offset - layout.packed_start, layout.bucket_bytes)
            size = min(layout.bucket_bytes, layout.n_bytes - (offset - used))
            buffer = self.buffers[bucket % len(self.buffers)][:size]
            room = buffer[used:].view(slot.dtype)
            part, values = values[: len(room)], values[len(room) :]
            room[: len(part)] = part
            offset += len(part) * slot.dtype.itemsize
            if used + len(part) * slot.dtype.itemsize > size - LINE_BYTES:  # the last line
                self._send(buffer)

    def _send(self, data: Tensor) -> None:
        self._pipeline.push(data)
        self._sent.append(data if self._keeps_data else bucket_digest(data))
