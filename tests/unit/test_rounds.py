"""How many groups are asked for at once."""

from __future__ import annotations

import random

from slurm_grpo.algorithms.rounds import HISTORY_STEPS, n_to_ask


def test_without_a_history_or_losses_only_what_is_missing_is_asked_for() -> None:
    assert n_to_ask(8, [], 4.0) == 8
    assert n_to_ask(8, [(8, 8)] * 9, 4.0) == 8
    assert n_to_ask(0, [(8, 20)], 4.0) == 0


def test_the_share_of_useful_groups_decides_up_to_the_bound() -> None:
    assert n_to_ask(8, [(8, 20)], 4.0) == 20
    assert n_to_ask(8, [(8, 20)], 2.0) == 16
    assert n_to_ask(8, [(8, 20)], 1.0) == 8
    assert n_to_ask(3, [(8, 20)], 4.0) == 8  # 7.5, rounded up


def test_only_the_last_steps_count() -> None:
    assert n_to_ask(8, [(8, 80)] * 10 + [(8, 16)] * HISTORY_STEPS, 4.0) == 16


def test_any_history_asks_for_enough_and_for_more_the_fewer_are_useful() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        history = [(n, n + rng.randint(0, 40)) for n in rng.choices(range(1, 20), k=7)]
        missing, oversample = rng.randint(1, 64), rng.uniform(1, 8)
        n = n_to_ask(missing, history, oversample)
        assert missing <= n <= missing * oversample
        worse = [(useful, looked_at + 5) for useful, looked_at in history]
        assert n <= n_to_ask(missing, worse, oversample)
        assert n <= n_to_ask(missing + 1, history, oversample)
