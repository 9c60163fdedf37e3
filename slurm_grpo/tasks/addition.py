"""Sums of two 2-digit numbers after two worked shots; a small model learns it in minutes."""

from __future__ import annotations

import zlib
from functools import cache
from itertools import combinations_with_replacement

from slurm_grpo.tasks.base import PromptSpec, few_shot, group_random

NAME = "addition"
_SHOTS = ((23, 14), (58, 27))


@cache
def held_out() -> tuple[tuple[int, int], ...]:
    """A fixed eighth of all unordered pairs, scrambled; neither order of a pair is trained on."""

    def scramble(pair: tuple[int, int]) -> int:
        return zlib.crc32(f"{NAME}/{pair[0]}+{pair[1]}".encode())

    shots = {tuple(sorted(shot)) for shot in _SHOTS}
    pairs = [p for p in combinations_with_replacement(range(10, 100), 2) if p not in shots]
    return tuple(sorted((p for p in pairs if scramble(p) % 8 == 0), key=scramble))


class Addition:
    """Uniform pairs outside `held_out()` and the shots."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._excluded = {*held_out(), *(tuple(sorted(shot)) for shot in _SHOTS)}

    def train_prompt(self, group_id: int) -> PromptSpec:
        rng = group_random(NAME, self._seed, group_id)
        while True:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            if (min(a, b), max(a, b)) not in self._excluded:
                return _prompt(a, b)

    def eval_prompts(self, n: int) -> list[PromptSpec]:
        # Every other pair the larger number first, as training sees both orders.
        pairs = held_out()[:n]
        return [_prompt(b, a) if i % 2 else _prompt(a, b) for i, (a, b) in enumerate(pairs)]


def _prompt(a: int, b: int) -> PromptSpec:
    shots = [(f"{x} + {y}", f"{x} + {y} = {x + y}") for x, y in _SHOTS]
    return few_shot(NAME, shots, f"{a} + {b}", a + b)
