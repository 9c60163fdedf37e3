"""Packs, their masks, and the assignment of groups to ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from slurm_grpo.errors import ConfigError
from slurm_grpo.trainer.attention import PADDING, Segment, build_pack_mask, build_visible
from slurm_grpo.trainer.batching import (
    assign_to_ranks,
    build_microbatch,
    count_trained_tokens,
    pack_groups,
)
from slurm_grpo.types import Group
from training import make_groups

CPU = torch.device("cpu")


def episodes(packs: list[list[Group]]) -> list[tuple[int, int]]:
    return [(e.group_id, e.sample_index) for pack in packs for part in pack for e in part]


def forwarded(pack: list[Group]) -> int:
    return len(build_microbatch(pack, CPU, None).token_ids_T)


def test_several_groups_share_a_pack_within_the_budget() -> None:
    groups = make_groups(9)
    packs = pack_groups(groups, 64)
    assert 1 < len(packs) < 9
    assert all(forwarded(pack) <= 64 for pack in packs)
    assert sorted(episodes(packs)) == [(g, i) for g in range(9) for i in range(4)]


def test_group_over_the_budget_is_split_and_its_prompt_repeated() -> None:
    groups = make_groups(1, group_size=16, seed=3)
    packs = pack_groups(groups, 40)
    assert len(packs) > 1
    assert all(forwarded(pack) <= 40 for pack in packs)
    prompt = torch.from_numpy(groups[0][0].prompt.token_ids).long()
    for pack in packs:
        assert torch.equal(build_microbatch(pack, CPU, None).token_ids_T[: len(prompt)], prompt)
    assert sorted(episodes(packs)) == [(0, i) for i in range(16)]


def test_prompt_with_one_completion_over_the_budget_is_refused_with_the_needed_budget() -> None:
    group = make_groups(1, group_size=1, seed=1)
    needed = len(group[0][0].prompt.token_ids) + len(group[0][0].completion.token_ids)
    pack_groups(group, needed)
    with pytest.raises(ConfigError, match=rf"tokens_per_microbatch is {needed - 1}.*{needed}\."):
        pack_groups(group, needed - 1)


def test_episodes_that_carry_nothing_to_learn_are_left_out() -> None:
    (group,) = make_groups(1, seed=2)
    empty = dataclasses.replace(
        group[2].completion,
        token_ids=group[2].completion.token_ids[:0],
        logprobs=group[2].completion.logprobs[:0],
        policy_versions=group[2].completion.policy_versions[:0],
    )
    group[0] = dataclasses.replace(group[0], error="timed out")
    group[1] = dataclasses.replace(group[1], advantage=None)
    group[2] = dataclasses.replace(group[2], completion=empty)
    assert episodes(pack_groups([group], 64)) == [(0, 3)]
    assert count_trained_tokens([group]) == len(group[3].completion.token_ids)


def test_completion_sees_its_prompt_and_its_own_past_only() -> None:
    (group,) = make_groups(1, group_size=2, seed=5)
    n_prompt = len(group[0].prompt.token_ids)
    lengths = [len(e.completion.token_ids) - 1 for e in group]
    assert min(lengths) > 1
    batch = build_microbatch([group], CPU, None)
    assert isinstance(batch.mask, tuple)
    (segment,) = batch.mask
    assert isinstance(segment, Segment)
    second = n_prompt + lengths[0]
    expected = torch.ones(segment.stop, segment.stop).tril().bool()
    expected[second:, n_prompt:second] = False
    assert torch.equal(segment.mask_LL == 0, expected)
    positions = [*range(n_prompt), *(n_prompt + i for n in lengths for i in range(n))]
    assert batch.positions_T.tolist() == positions


def test_rule_of_the_gpu_kernel_is_that_of_the_cpu_masks() -> None:
    group_T = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, PADDING, PADDING])
    completion_T = torch.tensor([0, 0, 1, 2, 0, 1, 1, 2, 2, 0, 0])
    segments = build_pack_mask(group_T, completion_T, ((0, 4), (4, 9), (9, 11)))
    assert isinstance(segments, tuple)
    expected = torch.block_diag(*((s.mask_LL == 0).float() for s in segments)).bool()
    rule = build_visible(group_T, completion_T)
    seen = create_mask(rule, 1, 1, 11, 11, device="cpu")[0, 0]
    assert torch.equal(seen, expected)
    assert bool(seen.any(-1).all())


def test_every_trained_token_is_predicted_by_the_token_before_it() -> None:
    groups = make_groups(3, seed=7)
    batch = build_microbatch(groups, CPU, None)
    assert len(batch.targets_N) == count_trained_tokens(groups)
    expected = [t for g in groups for e in g for t in e.completion.token_ids.tolist()]
    assert batch.targets_N.tolist() == expected
    before = [
        t
        for g in groups
        for e in g
        for t in [e.prompt.token_ids[-1], *e.completion.token_ids[:-1].tolist()]
    ]
    assert batch.token_ids_T[batch.predict_N].tolist() == before


def test_pack_without_groups_is_one_token_of_weight_zero() -> None:
    batch = build_microbatch([], CPU, None)
    assert len(batch.token_ids_T) == 1
    assert batch.tokens.weights_N.tolist() == [0.0]


def test_padding_fills_a_pack_to_its_fixed_length() -> None:
    batch = build_microbatch(make_groups(2), CPU, 128)
    assert len(batch.token_ids_T) == 128
    assert len(build_microbatch([], CPU, 128).token_ids_T) == 128


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 64])
def test_ranks_get_contiguous_runs_that_cover_all_groups(n_ranks: int) -> None:
    rows = assign_to_ranks([5, 1, 9, 3, 3, 7, 2], n_ranks)
    assert len(rows) == n_ranks
    assert [i for row in rows for i in row] == list(range(7))


def test_ranks_are_balanced_by_tokens() -> None:
    assert assign_to_ranks([8, 1, 1, 1, 1, 1, 1, 1, 1], 2) == [range(1), range(1, 9)]
    assert assign_to_ranks([10] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert assign_to_ranks([], 2) == [range(0), range(0)]
