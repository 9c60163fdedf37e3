"""Evaluations: split, handed over, and before anything else."""

from __future__ import annotations

import pytest

from scheduler_bench import LEADER, Bench, config
from slurm_grpo.errors import MessageError


def finish_chunks(bench: Bench, engine: int) -> int:
    chunks = bench.view(engine)["evals"]
    for chunk in chunks:
        n = chunk["stop"] - chunk["start"]
        sums = {"n": n, "n_judged": n, "n_correct": 1, "reward_sum": 0.5}
        sums |= {"n_tokens": 2 * n, "n_truncated": 0}
        bench.tell(f"engine-{engine}", "eval_result", **chunk, **sums)
    return len(chunks)


def test_an_evaluation_is_split_and_a_dead_engines_chunks_are_done_by_another() -> None:
    bench = Bench(config())
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=128)
    bench.sync(0)
    assert len(bench.view(0)["evals"]) == len(bench.view(1)["evals"]) == 2
    bench.exit(1)
    while finish_chunks(bench, 0):
        pass
    assert bench.leader["evals"] == {
        "before": {
            "version": 0,
            "n": 128,
            "n_judged": 128,
            "n_correct": 4,
            "reward_sum": 2.0,
            "n_tokens": 256,
            "n_truncated": 0,
        }
    }


def test_in_strict_mode_no_groups_are_given_while_an_evaluation_is_pending() -> None:
    bench = Bench(config(1))
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=8)
    bench.sync(0)
    assert bench.view(0)["groups"] == []
    finish_chunks(bench, 0)
    assert bench.view(0)["groups"] == [0, 1, 2, 3]


def test_the_door_to_a_new_version_is_refused_while_an_evaluation_needs_the_old_one() -> None:
    bench = Bench(config(1, max_staleness=1))
    bench.sync(0)
    bench.tell(LEADER, "evaluate", eval_id="before", version=0, n=8)
    with pytest.raises(MessageError, match="would end the evaluations before"):
        bench.open(1)
    bench.open(0)
