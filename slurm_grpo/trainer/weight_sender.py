"""Sends the policy's weights from trainer rank 0 to every engine worker over the policy group.

Gathered layers arrive one by one, are packed into two buckets in turn, and each bucket is broadcast
while the next is filled; a full copy of the model never exists here. Knows nothing about models: it
takes tensors and their metadata.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slurm_grpo.config import WeightSyncConfig
from slurm_grpo.control.policy_group import Broadcast, PolicyGroup
from slurm_grpo.control.weight_layout import Layout, Metadata, bucket_digest, digest_text
from slurm_grpo.errors import SlurmGrpoError, SyncError


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
    """Seconds of packing, sending and digests that `gather_s` did not cover."""


class WeightSender:
    """Keeps the layout and the two bucket buffers between transfers."""

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
        """Broadcast one version. `layers` yields full tensors in the order, dtypes and shapes of
        `metadata`.

        Tensors may be sent without a copy: leave them unchanged until this returns. Every receiver
        must already be at the door of the same epoch. When a broadcast fails, `layers` is still
        exhausted (the other trainer ranks gather in lockstep), the group is abandoned, and
        SyncError or DeadlineExceeded is raised.
        """
        started = time.monotonic()
        layout = self._layout_of(metadata)
        stream = _Stream(
            group, layout, self._take_buffers(group.device), started + self._cfg.transfer_timeout_s
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

    def _take_buffers(self, device: torch.device) -> list[Tensor]:
        buffers, self._buffers = self._buffers, []
        if not buffers or buffers[0].device != device:
            size = self._cfg.bucket_mib << 20
            buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        return buffers


class _Stream:
    """Writes tensors into buckets and broadcasts every bucket as it fills."""

    def __init__(
        self, group: PolicyGroup, layout: Layout, buffers: list[Tensor], deadline: float
    ) -> None:
        self.buffers = buffers
        self._group = group
        self._layout = layout
        self._deadline = deadline
        self._position = 0  # bytes of the stream written so far
        self._n_written = 0  # tensors written so far
        self._in_flight: list[Broadcast] = []
        self._digests: list[Tensor] = []

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
        if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
            raise SyncError(
                f"weights: tensor {self._n_written} is {name} {tensor.dtype} "
                f"{tuple(tensor.shape)}, but {slot.name} {slot.dtype} {slot.shape} was announced. "
                "Gather in the order of the metadata."
            )
        self._n_written += 1
        self._append(tensor.detach().to(self._group.device).contiguous().view(-1).view(torch.uint8))
        end = self._layout.n_bytes
        if self._n_written < len(self._layout.slots):
            end = self._layout.slots[self._n_written].offset
        self._append(
            torch.zeros(end - self._position, dtype=torch.uint8, device=self._group.device)
        )

    def close(self) -> Tensor:
        """Send the digests; returns them once everything has been sent."""
        if self._n_written != len(self._layout.slots):
            missing = [s.name for s in self._layout.slots[self._n_written :]]
            raise SyncError(
                f"weights: {len(missing)} announced tensors were not gathered, first {missing[0]}."
            )
        for broadcast in self._in_flight:
            broadcast.wait()
        digests = torch.stack(self._digests)
        self._group.broadcast(digests, deadline=self._deadline)
        return digests

    def _append(self, data: Tensor) -> None:
        while len(data):
            bucket, used = divmod(self._position, self._layout.bucket_bytes)
            start, end = self._layout.bounds(bucket)
            if used == 0 and len(self._in_flight) == 2:
                self._in_flight.pop(0).wait()  # it may still read the buffer that comes next
            part, data = data[: end - start - used], data[end - start - used :]
            self._position += len(part)
            if len(part) == end - start and part.storage_offset() % 8 == 0:
                self._send(part)  # the whole bucket lies inside one tensor: no copy
                continue
            buffer = self.buffers[bucket % 2][: end - start]
            buffer[used : used + len(part)] = part
            if self._position == end:
                self._send(buffer)

    def _send(self, data: Tensor) -> None:
        self._in_flight.append(self._group.start_broadcast(data, deadline=self._deadline))
        self._digests.append(bucket_digest(data))
