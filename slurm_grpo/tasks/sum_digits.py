"""The sum of a number's digits after two worked shots: 66 prompts to train on, 22 held out."""

from __future__ import annotations

import zlib
from functools import cache

from slurm_grpo.tasks.base import PromptSpec, few_shot, group_random

NAME = "sum_digits"
_SHOTS = (47, 82)


@cache
def held_out() -> tuple[int, ...]:
    """A fixed quarter of the 2-digit numbers, in a scrambled order."""
    numbers = [n for n in range(10, 100) if n not in _SHOTS]
    numbers.sort(key=lambda n: zlib.crc32(f"{NAME}/{n}".encode()))
    return tuple(numbers[: len(numbers) // 4])


class SumDigits:
    """Uniform 2-digit numbers outside `held_out()` and the shots."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = [n for n in range(10, 100) if n not in held_out() and n not in _SHOTS]

    def train_prompt(self, group_id: int) -> PromptSpec:
        return _prompt(group_random(NAME, self._seed, group_id).choice(self._numbers))

    def eval_prompts(self, n: int) -> list[PromptSpec]:
        return [_prompt(number) for number in held_out()[:n]]


def _prompt(number: int) -> PromptSpec:
    # Without words: asked in words, the small model's groups are mostly all right or all wrong.
    shots = [(str(n), _worked(n)) for n in _SHOTS]
    return few_shot(NAME, shots, str(number), sum(divmod(number, 10)))


def _worked(number: int) -> str:
    tens, ones = divmod(number, 10)
    return f"{tens} + {ones} = {tens + ones}"
