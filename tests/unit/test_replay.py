"""What `slurm-grpo replay` checks before it makes or starts anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.commands.replay import check_recorded, compare_losses, replay_config
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    EvalConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
)
from slurm_grpo.errors import ConfigError, ShardError
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.staging.manifest import Manifest, publish_manifest
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.supervisor.supervisor import role_modules_of


@pytest.fixture
def source(tmp_path: Path, tiny_model_dir: Callable[[], Path]) -> RunDir:
    """Two steps of one group each, in a shard each."""
    run = make_run(tmp_path / "source")
    cfg = Config(
        run=RunConfig(name="source", runs_dir=str(tmp_path), steps=4),
        model=ModelConfig(path=str(tiny_model_dir())),
        evaluation=EvalConfig(n_prompts=2),
        algorithm=AlgorithmConfig(groups_per_step=1, group_size=2),
        generator=GeneratorConfig(n_engines=1),
    )
    freeze_config(cfg, run.config)
    run.attempt(0).root.mkdir()
    run.attempt(0).resumed_from.write_text("0\n")
    for step in (1, 2):
        group = make_group(step - 1, oldest_version=step - 1)
        ref = publish_groups(run, [group], make_header(sequence=step))
        groups = ((step - 1, ref.path),)
        publish_manifest(run, Manifest(step=step, attempt=0, groups=groups, dropped=()))
    return run


def test_the_replay_has_no_engines_and_its_own_place_beside_the_run(source: RunDir) -> None:
    cfg, ignored = replay_config(source, None, ["--trainer.optimizer.lr", "1e-6"])
    assert (cfg.generator.n_engines, cfg.evaluation.n_prompts) == (0, 0)
    assert cfg.trainer.optimizer.lr == 1e-6
    assert cfg.run.replay_of == str(source.root)
    assert role_modules_of(cfg) == {"trainer": "slurm_grpo.trainer.replay"}
    assert cfg.run.name.startswith("source-replay-")
    assert cfg.run.runs_dir == str(source.root.parent)
    assert ignored == []


def test_a_file_changes_what_it_names_and_options_win(source: RunDir, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("trainer: {optimizer: {lr: 1e-6, beta1: 0.8}}\nrun: {name: other}\n")
    cfg, _ = replay_config(source, new, ["--trainer.optimizer.lr", "1e-7"])
    assert (cfg.trainer.optimizer.lr, cfg.trainer.optimizer.beta1) == (1e-7, 0.8)
    assert (cfg.run.name, cfg.run.steps) == ("other", 4)


def test_keys_of_generation_are_reported_and_keep_their_values(source: RunDir) -> None:
    options = ["--generator.sampling.temperature", "0.5", "--task.name", "sum_digits"]
    cfg, ignored = replay_config(source, None, options)
    assert ignored == ["task.name", "generator.sampling.temperature"]
    assert cfg.generator.sampling.temperature == 1.0


def test_another_group_size_is_refused(source: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.group_size: 3 given.*with 2"):
        replay_config(source, None, ["--algorithm.group_size", "3"])


def test_what_cannot_run_is_refused(source: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: .*nowhere"):
        replay_config(source, None, ["--model.path", str(tmp_path / "nowhere")])


def test_the_recorded_steps_are_counted_up_to_run_steps(source: RunDir) -> None:
    cfg, _ = replay_config(source, None, [])
    assert check_recorded(source, cfg) == 2
    assert check_recorded(source, replace(cfg, run=replace(cfg.run, steps=1))) == 1


def test_a_missing_shard_is_named_with_its_step(source: RunDir) -> None:
    cfg, _ = replay_config(source, None, [])
    gone = sorted(source.episodes.glob("*.h5"))[1]
    gone.unlink()
    with pytest.raises(ShardError, match=rf"1 of 2 .*{re.escape(gone.name)} of step 2.*steps 1"):
        check_recorded(source, cfg)
    assert check_recorded(source, replace(cfg, run=replace(cfg.run, steps=1))) == 1


def test_a_run_without_steps_cannot_be_replayed(source: RunDir) -> None:
    cfg, _ = replay_config(source, None, [])
    for path in source.manifests.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="nothing to replay"):
        check_recorded(source, cfg)


def test_the_first_step_whose_loss_differs_is_told(source: RunDir, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    for run, losses in ((source, (0.5, 0.25)), (other, (0.5, 0.125))):
        writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
        for step, loss in enumerate(losses, 1):
            writer.log(step, {"trainer/loss": loss})
        writer.close()
    assert "all 2 steps" in compare_losses(source, source)
    assert "before step 2: there 0.25 recorded, 0.125 replayed" in compare_losses(source, other)
    assert "no step was replayed" in compare_losses(source, make_run(tmp_path / "failed"))
