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
from typing import Any

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
    layout = _Layout()
    for part in pack:
        layout.add_group(part)
    if not pack:
        layout.add_filler()
    if pad_to is not None:
        layout.add_padding(pad_to - layout.n_tokens)
    columns = {
        name: torch.from_numpy(np.concatenate(parts).astype(_DTYPES[name])).to(device)
        for name, parts in layout.columns.items()
    }
    return MicroBatch(
        token_ids_T=columns["token_ids"],
        positions_T=columns["positions"],
        mask=build_pack_mask(columns["group"], columns["completion"], tuple(layout.segments)),
        predict_N=columns["predict"],
        targets_N=columns["targets"],
        tokens=TokenBatch(
            generator_logprobs_N=columns["generator_logprobs"],
            advantages_N=columns["advantages"],
            weights_N=columns["weights"],
        ),
    )


_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "positions": np.int64,
    "group": np.int32,
    "completion": np.int32,
    "predict": np.int64,
    "targets": np.int64,
    "generator_logprobs": np.float32,
    "advantages": np.float32,
    "weights": np.float32,
}


class _Layout:
    """The columns of a pack while it grows, and the (start, stop) of its groups."""

    def __init__(self) -> None:
        self.columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _DTYPES}
        self.segments: list[tuple[int, int]] = []
        self.n_tokens = 0

    def add_group(self, group: Group) -> None:
        start = self.n_tokens
        number = len(self.segments)
        prompt = group[0].prompt.token_ids
        self._add_tokens(prompt, 0, number, completion=0)
        prompt_end = self.n_tokens - 1
        for index, episode in enumerate(group, start=1):
            completion = episode.completion
            length = len(completion.token_ids)
            # The prompt's last token predicts the first of every completion.
            inside = np.arange(self.n_tokens, self.n_tokens + length - 1)
            self._add_tokens(completion.token_ids[:-1], len(prompt), number, completion=index)
            self._add_targets(
                np.concatenate([[prompt_end], inside]),
                completion.token_ids,
                completion.logprobs,
                np.full(length, episode.advantage),
                weight=1.0,
            )
        self.segments.append((start, self.n_tokens))

    def add_filler(self) -> None:
        """One token that predicts one of weight zero: FSDP needs every rank to take part in each
        pass.
        """
        self.add_padding(1)
        zero = np.zeros(1)
        self._add_targets(zero, zero, zero, zero, weight=0.0)

    def add_padding(self, n_tokens: int) -> None:
        if n_tokens:
            start = self.n_tokens
            zeros = np.zeros(n_tokens)
            self._append(token_ids=zeros, positions=zeros, group=zeros + PADDING, completion=zeros)
            self.n_tokens += n_tokens
            self.segments.append((start, self.n_tokens))

    def _add_tokens(
        self, token_ids: npt.NDArray[Any], first_position: int, group: int, *, completion: int
    ) -> None:
        n = len(token_ids)
        self._append(
            token_ids=token_ids,
            positions=np.arange(first_position, first_position + n),
            group=np.full(n, group),
            completion=np.full(n, completion),
        )
        self.n_tokens += n

    def _add_targets(
        self,
        predict: npt.NDArray[Any],
        targets: npt.NDArray[Any],
        generator_logprobs: npt.NDArray[Any],
        advantages: npt.NDArray[Any],
        *,
        weight: float,
    ) -> None:
        self._append(
            predict=predict,
            targets=targets,
            generator_logprobs=generator_logprobs,
            advantages=advantages,
            weights=np.full(len(targets), weight),
        )

    def _append(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self.columns[name].append(array)
