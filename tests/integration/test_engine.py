"""One real vLLM engine on a tiny model: what it returns for what it is given."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sync_peers import Peer, PeerError, engine_settings, peers
from tiny_models import Family, make_tiny_model

PROMPT = list(range(40, 110))
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", seed=3)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Peer]:
    with peers(engine_settings(model, load_weights=True, temperature=TEMPERATURE)) as (peer,):
        yield peer


def generate(engine: Peer, **admitted: Any) -> list[dict[str, Any]]:
    engine.call("admit", **admitted)
    (group,) = engine.call("step", n=200)
    completions: list[dict[str, Any]] = group["completions"]
    return completions


def reference_logits(model: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0, :-1]
    return logits


def test_log_probabilities_are_of_the_distribution_that_was_sampled(
    engine: Peer, model: Path
) -> None:
    for completion in generate(engine, group_id=1, token_ids=PROMPT, n=4, seed=100):
        tokens = completion["token_ids"]
        logits = reference_logits(model, PROMPT + tokens)[len(PROMPT) - 1 :]
        expected = torch.log_softmax(logits / TEMPERATURE, -1)
        picked = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(completion["logprobs"], picked, atol=1e-4)


def test_greedy_completion_takes_the_likeliest_tokens(engine: Peer, model: Path) -> None:
    (completion,) = generate(engine, group_id=1, token_ids=PROMPT, greedy=True)
    logits = reference_logits(model, PROMPT + completion["token_ids"])[len(PROMPT) - 1 :]
    assert completion["token_ids"] == logits.argmax(-1).tolist()


def test_completion_i_of_a_group_samples_with_the_base_seed_plus_i(engine: Peer) -> None:
    group = generate(engine, group_id=1, token_ids=PROMPT, n=4, seed=7)
    assert len({tuple(completion["token_ids"]) for completion in group}) == 4
    for index in range(4):
        (alone,) = generate(engine, group_id=1, token_ids=PROMPT, n=1, seed=7 + index)
        assert alone["token_ids"] == group[index]["token_ids"]


def test_completion_says_why_it_ended_under_which_version_and_when(engine: Peer) -> None:
    before = time.time()
    completions = generate(engine, group_id=1, token_ids=PROMPT, n=16, seed=20)
    for completion in completions:
        n_tokens = len(completion["token_ids"])
        assert completion["finish_reason"] == ("length" if n_tokens == 24 else "stop")
        assert completion["policy_versions"] == [0] * n_tokens
        submitted, first_token, finished = completion["times"]
        assert before <= submitted <= first_token <= finished <= time.time()


def test_groups_are_told_apart_by_tag_and_a_probe_in_between_loses_none(engine: Peer) -> None:
    engine.call("admit", group_id=5, token_ids=PROMPT, n=2, seed=1)
    engine.call("admit", group_id=5, token_ids=PROMPT, n=1, greedy=True, tag="eval")
    engine.call("step", n=2)
    for _ in range(30):  # more steps than the groups need
        assert len(engine.call("probe", token_ids=PROMPT)) == len(PROMPT) - 1
    assert engine.call("n_unfinished") == 0
    finished = engine.call("step", n=1)
    assert {(g["group_id"], g["tag"], len(g["completions"])) for g in finished} == {
        (5, "train", 2),
        (5, "eval", 1),
    }


@pytest.mark.slow
def test_seeded_generation_repeats_in_a_fresh_process(model: Path) -> None:
    settings = engine_settings(model, load_weights=True)
    with peers(settings, settings) as engines:
        for engine in engines:
            for group_id in range(4):
                engine.call(
                    "admit", group_id=group_id, token_ids=PROMPT[group_id:], n=4, seed=10 * group_id
                )
        first, second = (engine.call("step", n=200) for engine in engines)
    for left, right in zip(first, second, strict=True):
        assert left["group_id"] == right["group_id"]
        for one, other in zip(left["completions"], right["completions"], strict=True):
            assert (one["token_ids"], one["logprobs"]) == (other["token_ids"], other["logprobs"])


@pytest.mark.slow
def test_engine_samples_nothing_before_its_first_version_and_leaves_nothing_behind(
    tiny_model_dir: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with peers(engine_settings(tiny_model_dir("qwen3"))) as (engine,):
        with pytest.raises(PeerError, match="SyncError: the engine holds no usable weights"):
            engine.call("admit", group_id=0, token_ids=PROMPT)
        children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children")
        assert list(tmp_path.glob("slurm_grpo_engine_*"))
        engine.call("shutdown")
        assert children.read_text() == ""
        assert os.listdir(tmp_path) == []
