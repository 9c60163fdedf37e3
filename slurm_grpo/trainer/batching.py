"""From groups to micro-batches: which group goes to which rank, and packs in which a prompt is
forwarded once.

A pack holds, group after group, the prompt and then each completion with positions restarting
behind the prompt. The last token of a completion predicts nothing that is trained and is left out.
Knows nothing of models or files.

Axes: T tokens of the pack, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slurm_grpo.algorithms.loss import TokenBatch
from slurm_grpo.errors import ConfigError
from slurm_grpo.trainer.attention import PADDING, PackMask, build_pack_mask
from slurm_grpo.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One packed forward pass, on the trainer's device."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    mask: PackMask
    predict_N: Tensor  # int64, the pack index whose hidden state predicts the target
    targets_N: Tensor  # int64
    tokens: TokenBatch


def trained_episodes(group: Group) -> Group:
    """The episodes of a group that are trained on: scored without error, with an advantage and at
    least one token.
    """
    return [
        episode
        for episode in group
        if episode.error is None
        and episode.advantage is not None
        and len(episode.completion.token_ids)
    ]


def count_trained_tokens(groups: Sequence[Group]) -> int:
    """Completion tokens of the trained episodes: summed over ranks, the denominator of the step's
    loss.
    """
    return sum(len(e.completion.token_ids) for group in groups for e in trained_episodes(group))


def assign_to_ranks(n_tokens: Sequence[int], n_ranks: int) -> list[range]:
    """Contiguous runs of groups, one per rank, balanced by tokens. A group goes where its middle
    token falls.

    Deterministic; ranks may be left without groups.
    """
    ends = np.cumsum(n_tokens)
    middles = ends - np.asarray(n_tokens) / 2
    total = float(ends[-1]) if len(ends) else 0.0
    cuts = [int(np.searchsorted(middles, total * rank / n_ranks)) for rank in range(n_ranks + 1)]
    cuts[-1] = len(n_tokens)
    return [range(a, b) for a, b in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPacks:
    """One rank's packs of a step."""

    learning: list[list[Group]]
    quiet: list[list[Group]]
    """Groups whose advantages are all zero: no gradient comes from them."""
    n_trained_tokens: int

    @classmethod
    def build(cls, groups: Sequence[Group], tokens_per_microbatch: int) -> StepPacks:
        """Packs of the groups with a signal, and of those without; see `pack_groups`."""
        learning: list[Group] = []
        quiet: list[Group] = []
        for group in groups:
            signal = any(episode.advantage for episode in trained_episodes(group))
            (learning if signal else quiet).append(group)
        return cls(
            learning=pack_groups(learning, tokens_per_microbatch),
            quiet=pack_groups(quiet, tokens_per_microbatch),
            n_trained_tokens=count_trained_tokens(groups),
        )

    def padded(self, n_learning: int, n_quiet: int, *, n_trained_tokens: int) -> StepPacks:
        """With empty packs, of weight zero, up to the numbers and with the total of all ranks."""
        return StepPacks(
            learning=[*self.learning, *([] for _ in range(n_learning - len(self.learning)))],
            quiet=[*self.quiet, *([] for _ in range(n_quiet - len(self.quiet)))],
            n_trained_tokens=n_trained_tokens,
        )


def pack_groups(groups: Sequence[Group], tokens_per_microbatch: int) -> list[list[Group]]:
    """Packs of (parts of) groups, each within the budget; a group over it is split and its prompt
    repeated.

    Packs are filled first-fit in order, so the same groups always give the same packs. Raises
    `ConfigError` when a prompt with a single completion is over the budget.
    """
    packs: list[list[Group]] = []
    room: list[int] = []
    for group in groups:
        for part in _split_group(trained_episodes(group), tokens_per_microbatch):
            size = _n_forwarded(part)
            index = next((i for i, free in enumerate(room) if free >= size), len(packs))
            if index == len(packs):
                packs.append([])
                room.append(tokens_per_microbatch)
            packs[index].append(part)
            room[index] -= size
    return packs


def _split_group(group: Group, budget: int) -> list[Group]:
    parts: list[Group] = []
    size = 0
    for episode in group:
        n_prompt, n_completion = len(episode.prompt.token_ids), len(episode.completion.token_ids)
        if n_prompt + n_completion > budget:
            raise ConfigError(
                f"trainer.tokens_per_microbatch is {budget}, but group {episode.group_id} has a "
                f"prompt of {n_prompt} and a completion of {n_completion} tokens. Raise it to at "
                f"least {n_prompt + n_completion}."
            )
        if not parts or size + n_completion - 1 > budget:
            parts.append([])
            size = n_prompt
        parts[-1].append(episode)
        size += n_completion - 1
    return parts


def _n_forwarded(part: Group) -> int:
    return len(part[0].prompt.token_ids) + sum(len(e.completion.token_ids) - 1 for e in part)


def build_microbatch(pack: Sequence[Group], device: torch.device, pad_to: int | None) -> MicroBatch:
    """The tensors of one pack. `pad_to` fixes the length, so that GPU kernels are compiled once;
    None: no padding.

    An empty pack gives a micro-batch of weight zero, for a rank that has run out of groups.
    """
    parts: list[_Columns] = []
    segments: list[tuple[int, int]] = []
    for number, group in enumerate(pack):
        start = segments[-1][1] if segments else 0
        parts.append(_group_columns(group, number, start))
        segments.append((start, start + len(parts[-1]["token_ids"])))
    if not pack:  # one token that predicts one of weight zero: FSDP needs every rank in each pass
        zero = np.zeros(1)
        parts.append(_padding(1) | dict.fromkeys(_OF_TARGETS, zero))
        segments.append((0, 1))
    n_tokens = segments[-1][1]
    if pad_to is not None and pad_to > n_tokens:
        parts.append(_padding(pad_to - n_tokens))
        segments.append((n_tokens, pad_to))
    columns = {
        name: torch.from_numpy(np.concatenate([p[name] for p in parts if name in p]).astype(dtype))
        for name, dtype in _DTYPES.items()
    }
    columns = {name: column.to(device) for name, column in columns.items()}
    return MicroBatch(
        token_ids_T=columns["token_ids"],
        positions_T=columns["positions"],
        mask=build_pack_mask(columns["group"], columns["completion"], tuple(segments)),
        predict_N=columns["predict"],
        targets_N=columns["targets"],
        tokens=TokenBatch(
            generator_logprobs_N=columns["generator_logprobs"],
            advantages_N=columns["advantages"],
            weights_N=columns["weights"],
        ),
    )


_Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""A part of a pack, by the names of `_DTYPES`."""
_OF_TARGETS = ("predict", "targets", "generator_logprobs", "advantages", "weights")
_DTYPES = (
    dict.fromkeys(("token_ids", "positions", "predict", "targets"), np.int64)
    | dict.fromkeys(("group", "completion"), np.int32)
    | dict.fromkeys(("generator_logprobs", "advantages", "weights"), np.float32)
)


def _group_columns(group: Group, number: int, start: int) -> _Columns:
    """The group's part of a pack that begins at `start`."""
    prompt = group[0].prompt.token_ids
    completions = [episode.completion for episode in group]
    lengths = np.array([len(prompt), *(len(c.token_ids) - 1 for c in completions)])
    stops = start + np.cumsum(lengths)
    places = [np.arange(a, b) for a, b in pairwise([start, *stops.tolist()])]
    # Completions begin behind the prompt, whose last token predicts the first of each.
    shifts = [start, *(stops[:-1] - len(prompt))]
    targets = np.concatenate([c.token_ids for c in completions])
    return {
        "token_ids": np.concatenate([prompt, *(c.token_ids[:-1] for c in completions)]),
        "positions": np.concatenate([p - shift for p, shift in zip(places, shifts, strict=True)]),
        "group": np.full(lengths.sum(), number),
        "completion": np.repeat(np.arange(len(lengths)), lengths),
        "predict": np.concatenate([np.append(stops[0] - 1, inside) for inside in places[1:]]),
        "targets": targets,
        "generator_logprobs": np.concatenate([c.logprobs for c in completions]),
        "advantages": np.repeat([float(e.advantage or 0.0) for e in group], lengths[1:] + 1),
        "weights": np.ones(len(targets)),
    }


def _padding(n_tokens: int) -> _Columns:
    zeros = np.zeros(n_tokens)
    named = dict.fromkeys(("token_ids", "positions", "completion"), zeros)
    return named | {"group": zeros + PADDING}
