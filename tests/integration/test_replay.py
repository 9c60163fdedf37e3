"""Replays of a real run: the same trainer on the same steps, without engines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import runs
from slurm_grpo.run.checkpoints import complete_steps
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import committed_manifests

ModelDir = Callable[[], Path]
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from slurm_grpo.commands.main import main; sys.exit(main())",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: ModelDir) -> RunDir:
    """A strict run that was stopped after step 2 and resumed, with two trainer ranks."""
    folder = tmp_path_factory.mktemp("source")
    changes = {"run": {"steps": 2}, "trainer": {"n_ranks": 2, "schedule": {"warmup_steps": 1}}}
    run = runs.launch(runs.write_config(folder, tiny_model_dir(), changes))
    runs.resume(run, "--run.steps", "5")
    return run


def replay(source: RunDir, name: str, *options: str) -> tuple[RunDir, str]:
    done = subprocess.run(
        [*COMMAND, "replay", str(source.root), "--run.name", name, *options],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{runs.ROOT}{os.pathsep}{runs.TESTS}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(source.root.parent / name), done.stdout


def column(run: RunDir, name: str) -> list[float]:
    return [row[name] for row in runs.step_rows(run)]


def test_a_strict_run_replayed_with_its_own_configuration_repeats_every_loss(
    source: RunDir,
) -> None:
    run, said = replay(source, "again")
    assert "losses equal the recorded ones, bit for bit, in all 5 steps" in said
    for name in ("trainer/loss", "trainer/grad_norm", "trainer/mismatch_k3_nats", "trainer/lr"):
        assert column(run, name) == column(source, name)
    assert len(set(column(run, "trainer/loss"))) == 5
    summary = runs.summary(run)
    assert (summary["status"], summary["replay_of"]) == ("done", str(source.root))
    assert complete_steps(run) == [4, 5]
    pairs = zip(committed_manifests(run), committed_manifests(source), strict=True)
    assert all(a.groups == b.groups for a, b in pairs)
    for manifest in committed_manifests(run):
        assert all((run.root / path).is_file() for _, path in manifest.groups)


def test_another_learning_rate_and_estimator_change_the_losses_from_where_they_act(
    source: RunDir, tmp_path: Path
) -> None:
    new = tmp_path / "new.yaml"
    new.write_text(
        "trainer: {optimizer: {lr: 1e-2}}\ngenerator: {n_engines: 3, sampling: {temperature: 0.5}}"
    )
    faster, said = replay(source, "faster", "--config", str(new), "--run.steps", "3")
    assert "as they are: generator.n_engines" in said
    assert "as they are: generator.sampling.temperature" in said
    assert column(faster, "trainer/loss")[0] == column(source, "trainer/loss")[0]
    assert column(faster, "trainer/loss")[1:] != column(source, "trainer/loss")[1:3]

    centred, _ = replay(source, "centred", "--algorithm.advantage", "mean", "--run.steps", "1")
    assert column(centred, "trainer/loss")[0] != column(source, "trainer/loss")[0]
    assert column(centred, "reward/mean")[0] == column(source, "reward/mean")[0]


def test_a_replay_of_more_steps_than_were_recorded_ends_with_the_last_one(source: RunDir) -> None:
    run, _ = replay(source, "longer", "--run.steps", "9")
    assert runs.summary(run)["status"] == "done"
    assert len(runs.step_rows(run)) == 5
    assert complete_steps(run)[-1] == 5
