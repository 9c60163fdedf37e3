"""Weights from a real sender process into real engines, over gloo; the result judged by log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sync_peers import Peer, PeerError, engine_settings, peers, sync
from tiny_models import Family, make_tiny_model

pytestmark = pytest.mark.slow

PROBE = [256, *range(40, 110, 3), 256, *range(60, 90)]

TinyModel = Callable[[Family], Path]


def reference_logprobs(model: Path, token_ids: list[int]) -> list[float]:
    """Log-probabilities of the same tokens by transformers, fp32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([token_ids])).logits[0, :-1]
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])
    return picked[:, 0].tolist()


def assert_serves(engine: Peer, model: Path) -> None:
    difference = np.abs(np.subtract(engine.call("probe", token_ids=PROBE), reference_logprobs(model, PROBE)))
    assert difference.max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3"])
def test_engine_serves_each_version_it_was_sent(
    family: Family, tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2)]
    with peers(("sender", {}), engine_settings(tiny_model_dir(family))) as (sender, engine):
        for version, model in enumerate([*models, models[0]]):
            sync(sender, [engine], model, version)
            assert_serves(engine, model)
