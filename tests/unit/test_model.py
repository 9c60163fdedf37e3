"""Models built from Hugging Face directories, against transformers on the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurm_grpo.config.model_support import check_model_dir
from slurm_grpo.errors import ConfigError
from slurm_grpo.trainer.hf_layers import hf_metadata, iter_hf_layers
from slurm_grpo.trainer.learner import Learner
from tiny_models import Family
from training import hf_logprobs, make_config

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def copy_with(source: Path, target: Path, **config: Any) -> Path:
    """A copy of a model directory whose config.json has other values; None removes a key."""
    shutil.copytree(source, target)
    merged = json.loads((target / "config.json").read_text()) | config
    merged = {key: value for key, value in merged.items() if value is not None}
    (target / "config.json").write_text(json.dumps(merged))
    return target


def largest_difference(model_dir: Path) -> float:
    """Between the trainer's float32 log-probabilities and those of transformers."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 300, (200,), generator=generator)
    ours = Learner(make_config(model_dir), CPU).logprobs(token_ids.tolist())
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        theirs = hf_logprobs(model, token_ids)
    assert theirs.std() > 0.1
    return float((torch.tensor(ours) - theirs).abs().max())


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3"])
def test_logprobs_equal_those_of_transformers(
    family: Family, tiny_model_dir: Callable[[Family], Path]
) -> None:
    assert largest_difference(tiny_model_dir(family)) < 1e-4


def test_logprobs_equal_those_of_transformers_with_llama3_rope_scaling(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path
) -> None:
    path = copy_with(tiny_model_dir("llama"), tmp_path / "scaled", rope_parameters=LLAMA3_ROPE)
    assert largest_difference(path) < 1e-4


def test_rope_settings_of_older_config_files_are_understood(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path
) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    path = copy_with(
        tiny_model_dir("llama"),
        tmp_path / "older",
        rope_parameters=None,
        rope_scaling=scaling,
        rope_theta=500.0,
    )
    assert largest_difference(path) < 1e-4


@pytest.mark.model
def test_logprobs_of_smollm2_equal_those_of_transformers(smollm2_dir: Path) -> None:
    assert largest_difference(smollm2_dir) < 1e-4


def test_logprobs_are_at_the_temperature_asked_for(
    tiny_model_dir: Callable[[Family], Path],
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model_dir("llama")
    token_ids = list(range(40, 60))
    ours = Learner(make_config(path), CPU).logprobs(token_ids, temperature=0.7)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / 0.7
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architecture MixtralForCausalLM is not supported; supported: LlamaForCausalLM, Qwen3F",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling yarn"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu; only silu"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_name(
    changes: dict[str, Any],
    problem: str,
    tiny_model_dir: Callable[[Family], Path],
    tmp_path: Path,
) -> None:
    path = copy_with(tiny_model_dir("llama"), tmp_path / "changed", **changes)
    assert problem in "\n".join(check_model_dir(path))
    with pytest.raises(ConfigError, match=problem.split(";")[0]):
        Learner(make_config(path), CPU)


def test_directory_without_weights_or_tokenizer_is_refused_with_both_reasons(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path
) -> None:
    shutil.copy(tiny_model_dir("llama") / "config.json", tmp_path)
    assert len(check_model_dir(tmp_path)) == 2
    assert "no such directory" in check_model_dir(tmp_path / "nowhere")[0]
    assert check_model_dir(tiny_model_dir("qwen3")) == []


def test_weights_that_do_not_fit_their_config_are_refused(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path
) -> None:
    path = copy_with(tiny_model_dir("llama"), tmp_path / "three", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="do not fit"):
        Learner(make_config(path), CPU)


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3"])
def test_exported_layers_are_the_checkpoint_in_forward_order(
    family: Family, tiny_model_dir: Callable[[Family], Path]
) -> None:
    path = tiny_model_dir(family)
    learner = Learner(make_config(path), CPU)
    layers = list(iter_hf_layers(learner.model, learner.adapter, torch.float32))
    rows = [row for layer in layers for row in layer]
    assert len(layers) == 4
    assert [(n, t.dtype, tuple(t.shape)) for n, t in rows] == hf_metadata(
        learner.model, learner.adapter, torch.float32
    )
    original = load_file(path / "model.safetensors")
    assert {name for name, _ in rows} == set(original)
    assert all(torch.equal(tensor, original[name]) for name, tensor in rows)


def test_weights_in_several_files_of_another_dtype_load(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path
) -> None:
    path = tmp_path / "split"
    shutil.copytree(tiny_model_dir("llama"), path)
    tensors = {n: t.bfloat16() for n, t in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:7]}
    files["model-00002-of-00002.safetensors"] = names[7:]
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    learner = Learner(make_config(path), CPU)
    for layer in iter_hf_layers(learner.model, learner.adapter, torch.float32):
        assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in layer)
