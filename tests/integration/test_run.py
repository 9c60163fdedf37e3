"""Whole runs of the real engines on a tiny model: what they leave, how they survive trouble."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runs
from same_runs import assert_same_run, assert_trained_once, losses, trained_groups
from slurm_grpo.analysis import open_run
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.checkpoints import complete_steps
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.proctree import descendants, start_ticks
from slurm_grpo.staging.shards import list_shards
from sync_peers import engine_settings, peers

ModelDir = Callable[[], Path]

EXPECTED_METRICS = {
    "reward/mean",
    "reward/std",
    "reward/score",
    "completion/length_mean",
    "completion/length_max",
    "completion/truncation_rate",
    "groups/zero_spread_fraction",
    "staleness/min",
    "staleness/mean",
    "staleness/max",
    "generator/tokens_per_s",
    "generator/pause_s",
    "trainer/loss",
    "trainer/entropy_nats",
    "trainer/ratio_mean",
    "trainer/ratio_max",
    "trainer/clip_fraction",
    "trainer/grad_norm",
    "trainer/lr",
    "trainer/mismatch_k3_nats",
    "trainer/mismatch_max_nats",
    "trainer/tokens_per_s",
    "trainer/wait_for_groups_s",
    "trainer/read_s",
    "trainer/forward_backward_s",
    "trainer/optimizer_s",
    "trainer/sync_s",
    "trainer/step_s",
    "trainer/memory_bytes",
}


def processes(run: RunDir, submit: subprocess.Popen[bytes]) -> set[tuple[int, int]]:
    """(pid, start) of everything below the launching process."""
    found = descendants(submit.pid) - {submit.pid}
    return {(pid, ticks) for pid in found if (ticks := start_ticks(pid)) is not None}


def alive(known: set[tuple[int, int]]) -> set[int]:
    return {pid for pid, ticks in known if start_ticks(pid) == ticks}


def start_and_reach(config: Path, step: int) -> tuple[subprocess.Popen[bytes], RunDir]:
    """Launch, and return once `step` has been trained."""
    run = RunDir(config.parent / "runs" / "test")
    log = config.parent / "submit.log"
    submit = runs.start(config, log=log)

    def reached() -> bool:
        assert submit.poll() is None, runs.explain(run, log)
        return any(row["step"] >= step for row in runs.step_rows(run))

    runs.wait_until(reached, 240, f"step {step}")
    return submit, run


def test_a_run_trains_and_leaves_everything_the_readme_promises(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    pytest.importorskip("wandb")
    changes = {"trainer": {"checkpoint": {"export_hf": True}}, "wandb": {"enabled": True}}
    run = runs.launch(runs.write_config(tmp_path, tiny_model_dir(), changes))

    rows = runs.step_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert EXPECTED_METRICS - row.keys() == set()
        assert row["staleness/max"] == 0
        assert row["trainer/mismatch_max_nats"] < 1e-4
        assert row["sync/probe_max_abs_diff"] < 1e-4
    assert complete_steps(run) == [2, 3]
    assert_trained_once(run, 12)
    assert len(list_shards(run)) == 3  # strict: one per engine and step
    summary = runs.summary(run)
    assert (summary["status"], summary["steps"], summary["seed"]) == ("done", 3, 0)
    evaluated = summary["eval"]["held_out"]
    assert evaluated["metric"] == "reward"  # this scorer calls nothing right or wrong
    assert evaluated["before"] != evaluated["after"]
    assert summary["step_s_median"] > 0
    assert summary["peak_pss_bytes"] > 100e6
    assert all(
        summary["phase_s_median"][phase] >= 0
        for phase in ("wait", "read", "forward_backward", "optimizer", "sync", "pause")
    )
    assert "torch" in summary["versions"]
    assert list(run.wandb.glob("offline-run-*/*.wandb"))
    assert_export_matches(run)


def assert_export_matches(run: RunDir) -> None:
    """transformers and vLLM load the export and agree; its logits have moved, but not far."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = run.hf_export(3)
    assert AutoTokenizer.from_pretrained(path)("23 + 14").input_ids
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(read_config(run)["model"]["path"])
    episode = trained_groups(run)[0][0]
    ids = torch.tensor([[*episode.prompt.token_ids, *episode.completion.token_ids]]).long()
    with torch.no_grad():
        moved = (model(ids).logits - start(ids).logits).abs().max()
        odds = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    assert 1e-3 < moved < 10
    with peers(engine_settings(path, load_weights=True)) as (engine,):
        assert np.allclose(engine.call("probe", token_ids=ids[0].tolist()), odds, atol=1e-4)


def read_config(run: RunDir) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(run.config.read_text())
    return loaded


def test_two_engines_and_two_trainer_ranks_run_like_one(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {"generator": {"n_engines": 2}, "trainer": {"n_ranks": 2}, "run": {"steps": 2}}
    run = runs.launch(runs.write_config(tmp_path, tiny_model_dir(), changes))

    assert_trained_once(run, 8)
    assert {name.engine_id for _, name in list_shards(run)} == {0, 1}
    for row in runs.step_rows(run):
        assert row["trainer/mismatch_max_nats"] < 1e-4
        assert row["sync/probe_max_abs_diff"] < 1e-4


def test_generation_overlaps_training_within_the_staleness_bound(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {"algorithm": {"max_staleness": 1, "order": "ready"}, "run": {"steps": 6}}
    run = runs.launch(runs.write_config(tmp_path, tiny_model_dir(), changes))

    rows = runs.step_rows(run)
    assert len(rows) == 6
    assert max(row["staleness/max"] for row in rows) == 1
    assert_trained_once(run, 24)


def test_a_killed_engine_is_restarted_and_the_run_ends_with_all_groups(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    # Steps take an eighth of a second: the run must not be through before its engine is killed.
    config = runs.write_config(tmp_path, tiny_model_dir(), {"run": {"steps": 40}})
    submit, run = start_and_reach(config, 2)
    engine = process_named(submit, "slurm_grpo.generator.role")
    os.kill(engine, signal.SIGKILL)

    code = runs.finish(submit, 240)
    assert code == 0, runs.explain(run, tmp_path / "submit.log")
    assert_trained_once(run, 160)
    assert {name.incarnation for _, name in list_shards(run)} == {0, 1}


def process_named(submit: subprocess.Popen[bytes], module: str) -> int:
    """Pid of the role process that runs `module`."""
    for pid in descendants(submit.pid):
        try:
            if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return pid
        except OSError:
            continue
    raise AssertionError(f"no process runs {module}")


def assert_reward_is_of_all_episodes(run: RunDir) -> None:
    """What a step's policy earned, not what the groups did that the step selected."""
    episodes = open_run(run.root).episodes()
    episodes["step"] = episodes["policy_version_min"] + 1  # a strict run's
    rewards = episodes.groupby("step")["reward"].mean()
    rows = runs.step_rows(run)
    assert [row["reward/mean"] for row in rows] == pytest.approx(list(rewards), rel=1e-6)
    assert any(row["groups/zero_spread_fraction"] for row in rows)
    assert any(row["selected/reward_mean"] != row["reward/mean"] for row in rows)


@pytest.mark.parametrize("steps_before", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_instant_and_resumed_equals_the_uninterrupted_one(
    tmp_path: Path, tiny_model_dir: ModelDir, steps_before: int
) -> None:
    """Which step that is in, the machine decides: only then is it known how long both runs are.
    Groups are dropped, so the rounds of a step are asked for by what the steps before dropped."""
    rounds: dict[str, Any] = {
        "task": {"scorer": {"name": "reward_functions:often_equal"}},
        "algorithm": {"drop_zero_spread": True},
        "run": {"steps": 10_000},
    }
    config = runs.write_config(tmp_path / "cut", tiny_model_dir(), rounds)
    submit, run = start_and_reach(config, steps_before)
    delay_s = random.uniform(0.0, 0.5)
    time.sleep(delay_s)
    known = processes(run, submit)
    submit.kill()
    submit.wait()
    runs.wait_until(lambda: not alive(known), 60, f"the end of {known}")

    rounds["run"] = {"steps": max(losses(run)) + 3}
    runs.resume(run, "--run.steps", str(rounds["run"]["steps"]))
    reference = runs.launch(runs.write_config(tmp_path / "whole", tiny_model_dir(), rounds))
    assert_same_run(run, reference)
    assert any(row["groups/dropped_no_signal"] for row in runs.step_rows(run))
    assert_reward_is_of_all_episodes(reference)
    summary = runs.summary(run)
    assert (summary["status"], summary["n_attempts"]) == ("done", 2), delay_s
    assert summary["eval"] == runs.summary(reference)["eval"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_every_process_within_ten_seconds(
    tmp_path: Path, tiny_model_dir: ModelDir, number: signal.Signals
) -> None:
    config = runs.write_config(tmp_path, tiny_model_dir(), {"run": {"steps": 10_000}})
    submit, run = start_and_reach(config, 1)
    known = processes(run, submit)
    assert len(known) >= 3  # engine, scorer, trainer
    began = time.monotonic()
    submit.send_signal(number)

    assert runs.finish(submit, 10) == 128 + number
    runs.wait_until(lambda: not alive(known), 10 - (time.monotonic() - began), f"end of {known}")
    assert runs.summary(run)["status"] == "interrupted"


def test_usr1_checkpoints_at_the_next_boundary_and_the_run_resumes_from_there(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {"run": {"steps": 10_000}, "trainer": {"checkpoint": {"every_steps": 0}}}
    config = runs.write_config(tmp_path, tiny_model_dir(), changes)
    submit, run = start_and_reach(config, 1)
    submit.send_signal(signal.SIGUSR1)

    assert runs.finish(submit, 120) == ExitCode.STOPPED
    (step,) = complete_steps(run)
    assert runs.summary(run)["status"] == "stopped"
    runs.resume(run, "--run.steps", str(step + 1))
    assert max(losses(run)) == step + 1


@pytest.mark.parametrize(
    ("scorer", "code", "says"),
    [
        ("always_raises", ExitCode.SCORER, "this scorer is broken"),
        pytest.param("hangs", ExitCode.SCORER, "timeout_s", marks=pytest.mark.slow),
    ],
)
def test_a_broken_scorer_fails_the_run_and_says_why(
    tmp_path: Path, tiny_model_dir: ModelDir, scorer: str, code: int, says: str
) -> None:
    changes = {
        "task": {
            "scorer": {"name": f"reward_functions:{scorer}", "max_errors": 4, "timeout_s": 0.5}
        },
        "evaluation": {"n_prompts": 0},
    }
    config = runs.write_config(tmp_path, tiny_model_dir(), changes)
    log = tmp_path / "submit.log"
    assert runs.finish(runs.start(config, log=log), 240) == code
    assert says in log.read_text()
    assert runs.summary(RunDir(tmp_path / "runs" / "test"))["status"] == "failed"


def test_rewards_that_never_differ_fail_the_run_instead_of_searching_for_ever(
    tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {
        "task": {"scorer": {"name": "reward_functions:constant"}},
        "algorithm": {"drop_zero_spread": True, "max_dropped_per_step": 8},
    }
    config = runs.write_config(tmp_path, tiny_model_dir(), changes)
    log = tmp_path / "submit.log"
    assert runs.finish(runs.start(config, log=log), 240) == ExitCode.FAILURE
    assert "algorithm.max_dropped_per_step" in log.read_text()


@pytest.mark.slow
def test_a_diverging_run_ends_non_zero(tmp_path: Path, tiny_model_dir: ModelDir) -> None:
    changes = {"trainer": {"optimizer": {"lr": 1e30}, "schedule": {"warmup_steps": 0}}}
    config = runs.write_config(tmp_path, tiny_model_dir(), changes)
    log = tmp_path / "submit.log"
    assert runs.finish(runs.start(config, log=log), 240) not in (0, None)
    assert json.loads((tmp_path / "runs/test/summary.json").read_text())["status"] == "failed"
