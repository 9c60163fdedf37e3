"""Checkpoints that resume bit for bit, and exports that other programs load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slurm_grpo.run.checkpoints import COMPLETE, complete_steps, latest_complete, partial
from slurm_grpo.run.directory import RunDir
from slurm_grpo.trainer import checkpoint
from slurm_grpo.trainer.checkpoint import export_hf, load_checkpoint, prune, save_checkpoint
from slurm_grpo.trainer.learner import Learner
from tiny_models import Family
from training import copy_weights, hf_logprobs, make_config, make_groups

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


@pytest.fixture
def model_dir(tiny_model_dir: Callable[[Family], Path]) -> Path:
    return tiny_model_dir("llama")


def take_step(learner: Learner) -> float:
    groups = make_groups(3, seed=learner.step)
    return learner.train_step(groups)["trainer/loss"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_resumed_learner_takes_the_same_next_steps_bit_for_bit(
    family: Family, tiny_model_dir: Callable[[Family], Path], run: RunDir
) -> None:
    cfg = make_config(tiny_model_dir(family))
    learner = Learner(cfg, CPU)
    take_step(learner)
    take_step(learner)
    torch.manual_seed(11)
    save_checkpoint(run, 2, learner)
    expected_random = torch.rand(3)
    expected = [take_step(learner), take_step(learner)]

    resumed = Learner(cfg, CPU)
    resumed.logprobs([1, 2, 3])  # leaves nothing behind that outlives the load
    load_checkpoint(run, 2, resumed)
    assert resumed.step == 2
    assert torch.equal(torch.rand(3), expected_random)
    assert [take_step(resumed), take_step(resumed)] == expected
    weights = copy_weights(learner)
    assert all(torch.equal(t, weights[name]) for name, t in copy_weights(resumed).items())


def test_saving_does_not_change_the_steps_that_follow(model_dir: Path, run: RunDir) -> None:
    cfg = make_config(model_dir)
    plain, saving = Learner(cfg, CPU), Learner(cfg, CPU)
    save_checkpoint(run, 0, saving)
    for step in (1, 2):
        assert take_step(saving) == take_step(plain)
        save_checkpoint(run, step, saving)
    weights = copy_weights(plain)
    assert all(torch.equal(t, weights[name]) for name, t in copy_weights(saving).items())


def test_only_complete_checkpoints_are_seen(model_dir: Path, run: RunDir) -> None:
    assert latest_complete(run) is None
    save_checkpoint(run, 3, Learner(make_config(model_dir), CPU))
    (run.checkpoint(7)).mkdir()
    partial(run.checkpoint(9)).mkdir()
    (partial(run.checkpoint(9)) / COMPLETE).touch()
    assert latest_complete(run) == 3


def test_checkpoint_replaces_what_a_killed_attempt_left_in_its_place(
    model_dir: Path, run: RunDir
) -> None:
    partial(run.checkpoint(1)).mkdir()
    (partial(run.checkpoint(1)) / "leftover").touch()
    run.checkpoint(1).mkdir()
    save_checkpoint(run, 1, Learner(make_config(model_dir), CPU))
    assert latest_complete(run) == 1
    assert not (run.checkpoint(1) / "leftover").exists()
    assert not partial(run.checkpoint(1)).exists()


def test_prune_keeps_the_newest(model_dir: Path, run: RunDir) -> None:
    learner = Learner(make_config(model_dir), CPU)
    for step in (1, 2, 3):
        save_checkpoint(run, step, learner)
    prune(run, 2)
    assert complete_steps(run) == [2, 3]
    assert not run.checkpoint(1).exists()


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3"])
@pytest.mark.parametrize("max_file_bytes", [4 << 30, 100_000])
def test_export_gives_transformers_the_trained_logprobs(
    family: Family,
    max_file_bytes: int,
    tiny_model_dir: Callable[[Family], Path],
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", max_file_bytes)
    learner = Learner(make_config(tiny_model_dir(family), engine_dtype="float32"), CPU)
    take_step(learner)
    path = export_hf(run, 1, learner)
    n_files = len(list(path.glob("*.safetensors")))
    assert (n_files == 1) == (max_file_bytes > 100_000)
    assert (path / "model.safetensors.index.json").exists() == (n_files > 1)
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    AutoTokenizer.from_pretrained(path)
    token_ids = list(range(30, 90))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        theirs = hf_logprobs(model, token_ids)
    assert model.dtype == torch.float32
    ours = torch.tensor(learner.logprobs(token_ids))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
