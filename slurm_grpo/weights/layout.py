"""How weights lie on the wire: one byte stream cut into buckets, and the digests both sides
compare.

The sender and every receiver compute the same layout from the same metadata, so only metadata,
bytes and digests travel. Knows torch tensors, but neither process groups nor vLLM nor torchtitan.

Wire order of one transfer, all broadcast from the sender: header `[version, n_metadata_bytes,
bucket_bytes]` (int64), metadata (JSON as bytes), the buckets, the digest table (int64, one row per
bucket).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

Metadata: TypeAlias = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and full shape of every tensor, in the order they are sent."""

HEADER_FIELDS = 3
LINE_BYTES = 512
"""What a digest counts in. Tensors begin on a line, so that every dtype's view is aligned."""
_DIRECT_BYTES = 8 << 20
"""Tensors from this size on are sent from where they lie; smaller ones are packed together, since
every broadcast costs a fifth of a millisecond of waking threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """Where one tensor lies in the stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the stream
    n_bytes: int
    is_direct: bool
    """Whether it fills buckets of its own."""


class Layout:
    """Where tensors lie in the stream, and the buckets in which it is sent.

    A large tensor makes buckets of its own, so that its bytes need no copy; the small ones lie end
    to end behind all large ones (each on a 512-byte line). Buckets hold `bucket_bytes` at most.
    """

    def __init__(self, metadata: Metadata, bucket_bytes: int) -> None:
        if bucket_bytes <= 0 or bucket_bytes % LINE_BYTES:
            raise ValueError(
                f"bucket_bytes {bucket_bytes} is not a positive multiple of {LINE_BYTES}"
            )
        self.bucket_bytes = bucket_bytes
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in metadata]
        least = min(_DIRECT_BYTES, bucket_bytes)
        direct = [size >= least and size % LINE_BYTES == 0 for size in sizes]
        self.packed_start = sum(s for s, is_direct in zip(sizes, direct, strict=True) if is_direct)
        self.n_bytes = self.packed_start + sum(
            _whole_lines(s) for s, is_direct in zip(sizes, direct, strict=True) if not is_direct
        )
        """Length of the stream, padding included."""
        direct_end, packed_end = 0, self.packed_start
        sent = packed_end  # of the packed part
        slots: list[TensorSlot] = []
        buckets: list[tuple[int, int]] = []
        for (name, dtype, shape), size, is_direct in zip(metadata, sizes, direct, strict=True):
            offset = direct_end if is_direct else packed_end
            slots.append(
                TensorSlot(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    offset=offset,
                    n_bytes=size,
                    is_direct=is_direct,
                )
            )
            if is_direct:
                direct_end += size
                buckets += _cuts(offset, direct_end, bucket_bytes)
            else:
                packed_end += _whole_lines(size)
                whole = packed_end  # the last bucket is whole with the last small tensor
                if packed_end < self.n_bytes:
                    whole -= (packed_end - sent) % bucket_bytes
                buckets += _cuts(sent, whole, bucket_bytes)
                sent = whole
        self.slots = tuple(slots)
        self.buckets = tuple(buckets)
        """First byte and end in the stream, in the order they are sent: each as soon as a sender
        that writes the tensors in their order has it whole."""

    def views(self, stream: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors as views into a uint8 tensor that holds the stream; no copy."""
        return [
            (s.name, stream[s.offset : s.offset + s.n_bytes].view(s.dtype).view(s.shape))
            for s in self.slots
        ]

    @cached_property
    def encoded(self) -> bytes:
        """The metadata as JSON, what `decode_layout` reads."""
        rows = [[s.name, str(s.dtype).removeprefix("torch."), list(s.shape)] for s in self.slots]
        return json.dumps(rows, separators=(",", ":")).encode()


def _whole_lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE_BYTES) * LINE_BYTES


def _cuts(start: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, end)) for first in range(start, end, size)]


def decode_layout(encoded: bytes, bucket_bytes: int) -> Layout:
    """The layout whose sender announced this metadata and bucket size."""
    rows = json.loads(encoded)
    return Layout(
        [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows], bucket_bytes
    )


def bucket_digest(bucket: Tensor) -> Tensor:
    """Σw and Σ(i+1)·w mod 2^64 over the lines w of a bucket, computed on its device; int64 [2].

    A line's w is the sum of its 64 int64 words. Any change of the bytes of one line shows in Σw
    unless it leaves that sum alone, and lines in the wrong place show in Σ(i+1)·w. Finer or
    narrower words would cost a CPU about as much as the broadcast itself: this is one pass at the
    speed of memory.

    `bucket` is uint8, contiguous, a multiple of 512 bytes long.
    """
    lines = bucket.view(torch.int64).view(-1, LINE_BYTES // 8).sum(dim=1)
    positions = torch.arange(1, len(lines) + 1, device=bucket.device)
    return torch.stack((lines.sum(), (lines * positions).sum()))


def digest_text(digests: Tensor) -> str:
    """One hexadecimal digest over the table of all buckets' digests, to compare and to log."""
    return hashlib.blake2b(digests.cpu().numpy().tobytes(), digest_size=16).hexdigest()
