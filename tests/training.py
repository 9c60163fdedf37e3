"""Groups, configurations and references for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from slurm_grpo.trainer.learner import Learner
from slurm_grpo.trainer.model import named_weights, units
from slurm_grpo.types import Completion, Episode, Group, Prompt

VOCABULARY = 256  # those beyond are special: transformers keeps the padding token from learning


def make_config(
    model_dir: Path,
    *,
    n_steps: int = 4,
    engine_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    **trainer: Any,
) -> Config:
    """Float32, so that results can be compared closely."""
    return Config(
        run=RunConfig(steps=n_steps),
        model=ModelConfig(path=str(model_dir)),
        generator=GeneratorConfig(engine=EngineConfig(dtype=engine_dtype)),
        trainer=TrainerConfig(**{"forward_dtype": "float32", **trainer}),
    )


def make_groups(
    n_groups: int, *, group_size: int = 4, max_prompt: int = 12, max_tokens: int = 9, seed: int = 0
) -> list[Group]:
    """Groups of uneven lengths with random tokens, log-probabilities and advantages."""
    rng = np.random.default_rng(seed)
    return [_make_group(rng, g, group_size, max_prompt, max_tokens) for g in range(n_groups)]


def _make_group(
    rng: np.random.Generator, group_id: int, group_size: int, max_prompt: int, max_tokens: int
) -> Group:
    n_prompt = int(rng.integers(1, max_prompt + 1))
    prompt = Prompt(
        task="addition",
        text="",
        token_ids=rng.integers(0, VOCABULARY, n_prompt).astype(np.int32),
        target=0,
    )

    def episode(index: int) -> Episode:
        length = int(rng.integers(1, max_tokens + 1))
        completion = Completion(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            logprobs=rng.normal(-6.0, 0.3, length).astype(np.float32),
            policy_versions=np.zeros(length, np.int32),
            finish_reason="stop",
            text="",
            t_submit=0.0,
            t_first_token=0.0,
            t_finish=0.0,
        )
        return Episode(
            group_id=group_id,
            sample_index=index,
            sample_seed=index,
            prompt=prompt,
            completion=completion,
            reward=0.0,
            advantage=float(rng.normal()),
        )

    return [episode(index) for index in range(group_size)]


def hf_gradients(learner: Learner) -> dict[str, Tensor]:
    """The learner's gradients, whole, by Hugging Face names."""
    parameters = named_weights(learner.model)
    gradients = {}
    for unit in units(learner.model):
        whole = {}
        for name in unit:
            gradient = parameters[name].grad
            assert gradient is not None
            whole[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients.update(learner.adapter.to_hf(whole))
    return gradients


def reference_gradients(model_dir: Path, groups: list[Group], algorithm: AlgorithmConfig) -> Any:
    """(loss, gradients by name) from transformers, one episode at a time with its own prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    episodes = [episode for group in groups for episode in group]
    n_tokens = sum(len(episode.completion.token_ids) for episode in episodes)
    total = 0.0
    for episode in episodes:
        ids = np.concatenate([episode.prompt.token_ids, episode.completion.token_ids])
        start = len(episode.prompt.token_ids)
        logprobs = hf_logprobs(model, ids)[start - 1 :]
        ratio = (logprobs - torch.from_numpy(episode.completion.logprobs)).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        assert episode.advantage is not None
        objective = torch.minimum(ratio * episode.advantage, clipped * episode.advantage)
        loss = -objective.sum() / n_tokens
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def hf_logprobs(model: Any, token_ids: Any) -> Tensor:
    """Log-probability of each token but the first, from transformers."""
    ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.int64)
    logits = model(ids[None]).logits[0, :-1].float()
    logprobs: Tensor = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    return logprobs


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """L2 norm of the difference over the whole gradient, relative to `theirs`."""
    assert set(ours) == set(theirs)
    square = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in theirs)
    norm = sum(float(t.double().square().sum()) for t in theirs.values())
    return float((square / norm) ** 0.5)


def copy_weights(learner: Learner) -> dict[str, Tensor]:
    """Whole weights by torchtitan's names; compared bit for bit."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for unit in units(learner.model)
        for name, t in unit.items()
    }
