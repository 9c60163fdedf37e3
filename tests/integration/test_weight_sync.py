"""Weights from a real sender process into real engines, over gloo; the result judged by
log-probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sync_peers import Peer, PeerError, engine_settings, peers, sync
from tiny_models import Family, make_tiny_model

SLOW = pytest.mark.slow

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
    difference = np.abs(
        np.subtract(engine.call("probe", token_ids=PROBE), reference_logprobs(model, PROBE))
    )
    assert difference.max() < 1e-4


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("llama_untied", marks=SLOW), pytest.param("qwen3", marks=SLOW)]
)
def test_engine_serves_each_version_it_was_sent(
    family: Family, tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2)]
    with peers(("sender", {}), engine_settings(tiny_model_dir(family))) as (sender, engine):
        for version, model in enumerate([*models, models[0]]):
            sync(sender, [engine], model, version)
            assert_serves(engine, model)


@pytest.mark.slow
def test_two_engines_follow_one_sender_and_the_survivor_goes_on_after_the_other_is_killed(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    settings = engine_settings(tiny_model_dir("llama"), timeout_s=8)
    with peers(("sender", {"timeout_s": 8}), settings, settings) as (sender, first, second):
        sync(sender, [first, second], models[0], version=0)
        for engine in (first, second):
            assert_serves(engine, models[0])

        address = sender.call("address")
        received = dict(store=address, epoch=1, first_rank=1, world_size=3, version=1)
        first.start("receive", **received)
        second.process.kill()
        started = time.monotonic()
        sender.start("send", model=str(models[1]), version=1, epoch=1, world_size=3)
        with pytest.raises(PeerError, match=r"(SyncError|DeadlineExceeded): policy group epoch 1"):
            sender.reply()
        assert time.monotonic() - started < 8 + 20
        with pytest.raises(PeerError, match=r"(SyncError|DeadlineExceeded)"):
            first.reply()
        assert_serves(first, models[0])  # a failed transfer leaves the model alone

        sync(sender, [first], models[1], version=1, epoch=2)
        assert_serves(first, models[1])


@pytest.mark.slow
def test_stopped_receiver_costs_the_sender_no_more_than_its_deadline(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", seed=1)
    settings = engine_settings(tiny_model_dir("llama"), timeout_s=3)
    with peers(("sender", {"timeout_s": 3}), settings) as (sender, engine):
        sync(sender, [engine], model, version=0)
        address = sender.call("address")
        sender.start("send", model=str(model), version=1, epoch=1, world_size=2)  # nobody receives
        started = time.monotonic()
        with pytest.raises(
            PeerError, match=r"DeadlineExceeded: policy group epoch 1, rank 0 of 2: .*3 s"
        ):
            sender.reply()
        assert time.monotonic() - started < 3 + 20

        with pytest.raises(PeerError, match=r"(SyncError|DeadlineExceeded): receiving version 1"):
            engine.call("receive", store=address, epoch=1, first_rank=1, world_size=2, version=1)
        sync(sender, [engine], model, version=1, epoch=2)


def test_damaged_bucket_is_refused_and_the_version_can_be_sent_again(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    with peers(("sender", {}), engine_settings(tiny_model_dir("llama"))) as (sender, engine):
        sync(sender, [engine], models[0], version=0)
        address = sender.call("address")
        sender.start(
            "send", model=str(models[1]), version=1, epoch=2, world_size=2, corrupt_bucket=0
        )
        engine.start("receive", store=address, epoch=2, first_rank=1, world_size=2, version=1)
        with pytest.raises(
            PeerError, match=r"SyncError.*arrived damaged.*1 of 1 buckets, first 0\."
        ):
            engine.reply()
        sender.reply()
        assert_serves(engine, models[0])
        with pytest.raises(
            PeerError, match=r"SyncError: installing version 1.*is not in staging, which holds None"
        ):
            engine.call("install", version=1)
        with pytest.raises(PeerError, match="install a version before sampling"):
            engine.call("probe", token_ids=PROBE)
        sync(sender, [engine], models[1], version=1, epoch=3)
        assert_serves(engine, models[1])


@pytest.mark.slow
def test_weights_of_another_shape_fail_to_load_and_the_right_ones_then_load(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    wrong = make_tiny_model(tmp_path / "wrong", "llama_untied", seed=1)
    right = make_tiny_model(tmp_path / "right", "qwen3", seed=2)
    with peers(("sender", {}), engine_settings(tiny_model_dir("qwen3"))) as (sender, engine):
        with pytest.raises(PeerError, match=r"SyncError: installing version 0"):
            sync(sender, [engine], wrong, version=0)
        sync(sender, [engine], right, version=0)
        assert_serves(engine, right)


def test_update_in_the_middle_of_a_generation_shows_as_version_spans(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    settings = engine_settings(tiny_model_dir("llama"), max_new_tokens=40)
    prompt = list(range(40, 110))
    with peers(("sender", {}), settings) as (sender, engine):
        sync(sender, [engine], models[0], version=0)
        engine.call("admit", group_id=0, token_ids=prompt, n=4, seed=5)
        assert engine.call("step", n=10) == []
        n_running = engine.call("n_unfinished")
        sync(sender, [engine], models[1], version=7)
        assert engine.call("n_unfinished") == n_running
        (group,) = engine.call("step", n=100)
    n_mixed = 0
    for completion in group["completions"]:
        versions = completion["policy_versions"]
        n_old = versions.count(0)
        assert versions == [0] * n_old + [7] * (len(versions) - n_old)
        n_mixed += 0 < n_old < len(versions)
        tokens = prompt + completion["token_ids"]
        old, new = (reference_logprobs(model, tokens)[len(prompt) - 1 :] for model in models)
        # The new tokens' too: the KV cache of the old weights was recomputed.
        np.testing.assert_allclose(completion["logprobs"], old[:n_old] + new[n_old:], atol=1e-4)
    assert n_mixed >= 2


@pytest.mark.slow
def test_prefix_cached_under_old_weights_is_not_used_under_new_ones(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    prompt = list(range(40, 140))  # three whole blocks
    with peers(("sender", {}), engine_settings(tiny_model_dir("llama"))) as (sender, engine):
        for version, model in enumerate(models):
            sync(sender, [engine], model, version)
            for _ in range(2):
                engine.call("admit", group_id=0, token_ids=prompt, greedy=True)
                (group,) = engine.call("step", n=100)
                completion = group["completions"][0]
                expected = reference_logprobs(model, prompt + completion["token_ids"])[
                    len(prompt) - 1 :
                ]
                np.testing.assert_allclose(completion["logprobs"], expected, atol=1e-4)


@pytest.mark.slow
def test_tensor_parallel_engine_receives_with_every_worker(
    tiny_model_dir: TinyModel, tmp_path: Path
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    settings = engine_settings(tiny_model_dir("llama"), tensor_parallel=2)
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    with peers(("sender", {}), settings) as (sender, engine):
        address = sender.call("address")
        for version, model in enumerate(models):
            sender.start("send", model=str(model), version=version, epoch=1, world_size=3)
            engine.start(
                "receive", store=address, epoch=1, first_rank=1, world_size=3, version=version
            )
            assert engine.reply()["digest"] == sender.reply()["digest"]
            engine.call("install", version=version)
            assert_serves(engine, model)
        with pytest.raises(PeerError, match="SyncError: installing version 9, worker 0"):
            engine.call("install", version=9)
        engine.call("install", version=1)
        assert_serves(engine, models[1])
        engine.call("shutdown")
        assert set(Path("/dev/shm").glob("vllm_dist_*")) <= before


@pytest.mark.model
def test_real_model_serves_the_version_it_was_sent(smollm2_dir: Path) -> None:
    prompt = list(range(1000, 1060))
    settings = engine_settings(smollm2_dir)
    with peers(("sender", {}), settings) as (sender, engine):
        sync(sender, [engine], smollm2_dir, version=0)
        served = engine.call("probe", token_ids=prompt)
    difference = np.abs(np.subtract(served, reference_logprobs(smollm2_dir, prompt)))
    assert difference.max() < 1e-4
