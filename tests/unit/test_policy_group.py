"""The policy group over gloo between threads, the layout of its stream and its digests. No vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slurm_grpo.config.schema import WeightSyncConfig
from slurm_grpo.control.address import host_address
from slurm_grpo.errors import DeadlineExceeded, SyncError
from slurm_grpo.weights import policy_group
from slurm_grpo.weights.layout import (
    HEADER_FIELDS,
    Layout,
    Metadata,
    bucket_digest,
    decode_layout,
    digest_text,
)
from slurm_grpo.weights.policy_group import PolicyGroup, make_store
from slurm_grpo.weights.sender import SendResult, WeightSender

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = make_store(host_address())
    yield address
    del store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def form(
    pool: ThreadPoolExecutor, address: str, n: int, epoch: int = 0, timeout_s: float = 20.0
) -> list[PolicyGroup]:
    """All members of one epoch, formed at once."""
    members = [
        pool.submit(PolicyGroup, address, epoch, rank, n, CPU, timeout_s) for rank in range(n)
    ]
    return [member.result() for member in members]


def receive(group: PolicyGroup) -> tuple[int, Layout, torch.Tensor, torch.Tensor]:
    """What an engine worker does with a transfer: version, layout, stream, the sender's digests."""
    header = torch.empty(HEADER_FIELDS, dtype=torch.int64)
    group.broadcast(header)
    version, n_metadata_bytes, bucket_bytes = header.tolist()
    metadata = torch.empty(n_metadata_bytes, dtype=torch.uint8)
    group.broadcast(metadata)
    layout = decode_layout(metadata.numpy().tobytes(), bucket_bytes)
    stream = torch.empty(layout.n_bytes, dtype=torch.uint8)
    for start, end in layout.buckets:
        group.broadcast(stream[start:end])
    digests = torch.empty(len(layout.buckets), 2, dtype=torch.int64)
    group.broadcast(digests)
    return version, layout, stream, digests


def random_weights() -> dict[str, torch.Tensor]:
    """Tensors of all sizes and dtypes: below a line, and one over several buckets of 1 MiB."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((7,), torch.bfloat16),
        ((300, 301), torch.float32),
        ((), torch.float32),
        ((2000, 1536), torch.bfloat16),
        ((64, 65), torch.float16),
    ]
    return {
        f"layers.{i}.weight": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(shapes)
    }


def metadata_of(weights: dict[str, torch.Tensor]) -> Metadata:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


def one_by_one(weights: dict[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    for item in weights.items():
        yield [item]


def sender() -> WeightSender:
    return WeightSender(WeightSyncConfig(bucket_mib=1, transfer_timeout_s=20))


@pytest.mark.parametrize("last", ["layers.3.weight", "layers.4.weight"], ids=["large", "small"])
def test_weights_arrive_bit_for_bit_at_every_receiver(
    last: str, store_address: str, pool: ThreadPoolExecutor
) -> None:
    groups = form(pool, store_address, 3)
    weights = random_weights()
    weights[last] = weights.pop(last)
    weight_sender = sender()
    for version in range(4):
        if version == 3:  # nothing to pack
            weights = {"layers.3.weight": weights["layers.3.weight"]}
        receivers = [pool.submit(receive, group) for group in groups[1:]]
        result: SendResult = weight_sender.send(
            groups[0], one_by_one(weights), metadata_of(weights), version
        )
        for receiver in receivers:
            received_version, layout, stream, digests = receiver.result()
            assert received_version == version
            views = layout.views(stream)
            assert [name for name, _ in views] == list(weights)
            for name, tensor in views:
                assert torch.equal(tensor, weights[name])
            buckets = [stream[start:end] for start, end in layout.buckets]
            assert torch.equal(digests, torch.stack([bucket_digest(b) for b in buckets]))
            assert digest_text(digests) == result.digest
            assert layout.n_bytes == result.n_bytes
    for group in groups:
        group.abandon()


def test_layout_survives_its_encoding_and_has_the_small_tensors_behind_the_large_ones() -> None:
    layout = Layout(metadata_of(random_weights()), MIB)
    decoded = decode_layout(layout.encoded, MIB)
    assert decoded.slots == layout.slots
    large = 2000 * 1536 * 2
    assert layout.buckets[:6] == tuple(
        (start, min(start + MIB, large)) for start in range(0, large, MIB)
    )
    assert layout.buckets[6:] == ((large, layout.n_bytes),)  # the small ones, last


def test_a_bucket_of_small_tensors_is_sent_as_soon_as_it_is_full() -> None:
    small, large = (torch.bfloat16, (200_000,)), (torch.bfloat16, (MIB,))
    layout = Layout(
        [("a", *small), ("b", *large), ("c", *small), ("d", *small), ("e", *large)], MIB
    )
    b, e, small_ones, end = 0, 2 * MIB, 4 * MIB, layout.n_bytes
    assert layout.buckets == (
        *((b, MIB), (MIB, e)),
        *((small_ones, 5 * MIB), (5 * MIB, end)),
        *((e, 3 * MIB), (3 * MIB, small_ones)),
    )


def test_digest_is_the_sum_over_lines_and_the_sum_by_position() -> None:
    bucket = torch.randint(0, 256, (64 * 512,), dtype=torch.uint8)
    lines = bucket.view(torch.int64).view(64, 64).tolist()
    sums = [sum(line) for line in lines]
    expected = [sum(sums), sum((i + 1) * s for i, s in enumerate(sums))]
    assert [d % 2**64 for d in bucket_digest(bucket).tolist()] == [e % 2**64 for e in expected]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[777].bitwise_xor_(1),
        lambda b: b.copy_(b.roll(512)),
        lambda b: b[1024:2048].copy_(b[2048:3072].clone()),
        lambda b: b[-512:].zero_(),
    ],
    ids=["one bit", "shifted by a line", "a stale part", "a lost tail"],
)
def test_damaged_bucket_has_another_digest(damage: Callable[[torch.Tensor], Any]) -> None:
    layout = Layout(metadata_of(random_weights()), MIB)
    stream = torch.randint(0, 256, (layout.n_bytes,), dtype=torch.uint8)

    def digests() -> torch.Tensor:
        return torch.stack([bucket_digest(stream[start:end]) for start, end in layout.buckets])

    before = digests()
    damage(stream[slice(*layout.buckets[3])])
    assert (before != digests()).any(dim=1).nonzero().tolist() == [[3]]


def test_member_that_never_posts_costs_the_others_no_more_than_their_deadline(
    store_address: str, pool: ThreadPoolExecutor
) -> None:
    groups = form(pool, store_address, 2, timeout_s=2.0)
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"policy group epoch 0, rank 1 of 2: .*deadline 2 s"
    ):
        groups[1].broadcast(torch.zeros(1000))
    assert time.monotonic() - started < 2 + 10
    for group in groups:
        group.abandon()


def test_abandoning_with_an_operation_pending_does_not_block_and_the_next_epoch_works(
    store_address: str, pool: ThreadPoolExecutor
) -> None:
    groups = form(pool, store_address, 2, timeout_s=60.0)
    groups[1].start_broadcast(torch.zeros(1000))
    started = time.monotonic()
    for group in groups:
        group.abandon()
    with pytest.raises(SyncError, match="already abandoned"):
        groups[1].broadcast(torch.zeros(1))
    following = form(pool, store_address, 2, epoch=1)
    assert time.monotonic() - started < 15
    data = [torch.full((5,), float(rank)) for rank in range(2)]
    for done in [
        pool.submit(group.broadcast, tensor) for group, tensor in zip(following, data, strict=True)
    ]:
        done.result()
    assert torch.equal(data[1], torch.zeros(5))
    for group in following:
        group.abandon()


def test_group_without_all_its_members_is_not_formed(store_address: str) -> None:
    with pytest.raises(
        (SyncError, DeadlineExceeded), match="epoch 4, rank 1 of 2: forming it over"
    ):
        PolicyGroup(store_address, 4, 1, 2, CPU, 1.0)


def test_member_that_hangs_while_it_connects_costs_the_others_no_more_than_their_deadline(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_group, "_build_gloo", lambda *_: time.sleep(30))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"epoch 5, rank 0 of 1: forming it .*deadline 1 s"):
        PolicyGroup(store_address, 5, 0, 1, CPU, 1.0)
    assert time.monotonic() - started < 1 + 10


def test_store_that_is_not_there_is_named() -> None:
    store, address = make_store("127.0.0.1")
    del store
    with pytest.raises((SyncError, DeadlineExceeded), match=address):
        PolicyGroup(address, 0, 0, 2, CPU, 1.0)


def test_failed_broadcast_still_exhausts_the_layers(
    store_address: str, pool: ThreadPoolExecutor
) -> None:
    groups = form(pool, store_address, 2)
    groups[1].abandon()
    weights = random_weights()
    layers = one_by_one(weights)
    with pytest.raises((SyncError, DeadlineExceeded)):
        WeightSender(WeightSyncConfig(bucket_mib=1, transfer_timeout_s=2)).send(
            groups[0], layers, metadata_of(weights), 1
        )
    assert next(layers, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"layers.1.weight": torch.zeros(300, 302)}, r"tensor 1 is .*302.*announced"),
        (lambda w: w | {"extra": torch.zeros(3)}, "extra comes after the last of 5"),
        (lambda w: dict(list(w.items())[:-1]), "1 announced tensors were not gathered"),
    ],
)
def test_layers_that_differ_from_their_metadata_are_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
    store_address: str,
    pool: ThreadPoolExecutor,
) -> None:
    groups = form(pool, store_address, 2, timeout_s=3)
    weights = random_weights()
    receiver = pool.submit(receive, groups[1])
    with pytest.raises(SyncError, match=message):
        sender().send(groups[0], one_by_one(change(weights)), metadata_of(weights), 1)
    with pytest.raises((SyncError, DeadlineExceeded)):
        receiver.result()
