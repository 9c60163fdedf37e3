"""Training sharded over real processes equals training on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from slurm_grpo.run.directory import RunDir
from slurm_grpo.trainer.checkpoint import load_checkpoint
from slurm_grpo.trainer.learner import Learner
from tiny_models import Family
from training import copy_weights, make_config, relative_difference
from training_ranks import BUDGET, N_STEPS, train

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[("llama", 2), ("qwen3", 3)], ids=["llama-2", "qwen3-3"])
def results(
    request: pytest.FixtureRequest,
    tiny_model_dir: Callable[[Family], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """What every rank got, what one rank gets, and the run directory of the several."""
    family, n_ranks = request.param
    root = tmp_path_factory.mktemp("ranks")
    RunDir(root).create()
    alone = tmp_path_factory.mktemp("alone")
    RunDir(alone).create()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    script = str(REPOSITORY / "tests" / "training_ranks.py")
    model_dir = tiny_model_dir(family)
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(model_dir), str(root), str(rank), str(n_ranks)], env=env
        )
        for rank in range(n_ranks)
    ]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        expected = train(model_dir, RunDir(alone), 0, 1)
        assert [process.wait(timeout=300) for process in processes] == [0] * n_ranks
        ranks = [torch.load(root / f"rank-{rank}.pt") for rank in range(n_ranks)]
        yield {
            "ranks": ranks,
            "alone": expected,
            "run": RunDir(root),
            "model_dir": model_dir,
        }
    finally:
        for process in processes:
            process.kill()
        dist.destroy_process_group()


def test_short_ranks_run_microbatches_of_weight_zero(results: dict[str, Any]) -> None:
    n_packs = [rank["n_packs"] for rank in results["ranks"]]
    assert {rank["n_microbatches"] for rank in results["ranks"]} == {max(n_packs)}
    assert min(n_packs) < max(n_packs)


def test_gradient_of_several_ranks_is_that_of_one(results: dict[str, Any]) -> None:
    for rank in results["ranks"]:
        assert relative_difference(rank["gradients"], results["alone"]["gradients"]) < 1e-5


def test_metrics_of_several_ranks_are_those_of_one_on_every_rank(results: dict[str, Any]) -> None:
    timed = ("_s", "n_microbatches")
    for rank in results["ranks"]:
        for ours, alone in zip(rank["metrics"], results["alone"]["metrics"], strict=True):
            expected = {name: v for name, v in alone.items() if not name.endswith(timed)}
            assert {name: ours[name] for name in expected} == pytest.approx(
                expected, rel=1e-4, abs=1e-6
            )


def test_weights_after_two_steps_are_those_of_one_rank(results: dict[str, Any]) -> None:
    for rank in results["ranks"]:
        for name, expected in results["alone"]["weights"].items():
            torch.testing.assert_close(rank["weights"][name], expected, atol=1e-5, rtol=0)


def test_every_rank_exports_the_whole_trained_layers(results: dict[str, Any]) -> None:
    first = results["ranks"][0]
    assert set(first["exported"]) == set(results["alone"]["exported"])
    for rank in results["ranks"]:
        for name, tensor in rank["exported"].items():
            assert torch.equal(tensor, first["exported"][name])
            alone = results["alone"]["exported"][name]
            torch.testing.assert_close(tensor, alone, atol=1e-5, rtol=0)


def test_logprobs_are_the_same_on_every_rank(results: dict[str, Any]) -> None:
    alone = torch.tensor(results["alone"]["logprobs"])
    for rank in results["ranks"]:
        ours = torch.tensor(rank["logprobs"])
        torch.testing.assert_close(ours, alone, atol=1e-3, rtol=0)


def test_loss_that_is_bad_on_one_rank_stops_all(results: dict[str, Any]) -> None:
    assert all(rank["non_finite"] for rank in results["ranks"])


def test_checkpoint_of_several_ranks_resumes_on_one(results: dict[str, Any]) -> None:
    cfg = make_config(results["model_dir"], tokens_per_microbatch=BUDGET)
    learner = Learner(cfg, torch.device("cpu"))
    load_checkpoint(results["run"], N_STEPS, learner)
    assert learner.step == N_STEPS
    for name, weight in copy_weights(learner).items():
        assert torch.equal(weight, results["ranks"][0]["weights"][name])
