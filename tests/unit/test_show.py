"""Reading single episodes in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sample_episodes import begin_attempt, make_group, make_header, make_run, train_step
from slurm_grpo.analysis.terminal import printable
from slurm_grpo.commands import main as cli
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.layout import MAX_SAMPLES
from slurm_grpo.staging.shards import publish_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "test")
    begin_attempt(run, 0, 0)
    group = make_group(1, n_episodes=3)
    group[0] = replace(group[0], reward=-2.0, reward_parts={"correct": 0.0, "format": -2.0})
    group[1] = replace(group[1], completion=replace(group[1].completion, text="\x1b[2Jerased"))
    group[2] = replace(group[2], error="ValueError: boom", reward=0.0)
    train_step(run, 1, publish_groups(run, [group, make_group(2)], make_header()))
    return run


def show(run: RunDir, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["episodes", "show", str(run.root), *arguments]) == 0
    return capsys.readouterr().out


def test_the_best_and_the_worst_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(run, capsys, "--best", "1", "--worst", "2")
    assert f"best 1: episode {MAX_SAMPLES + 1} (task addition, policy version 0, step 1)" in text
    assert f"worst 1: episode {MAX_SAMPLES} " in text
    assert "reward -2.000  correct 0.000  format -2.000  advantage -1.000" in text
    assert f"worst 2: episode {2 * MAX_SAMPLES} " in text
    for id_ in make_group(1)[0].completion.token_ids:
        assert str(id_) in text


def test_a_group_and_single_episodes_are_shown(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(run, capsys, "--group", "1", "--episode", str(2 * MAX_SAMPLES))
    assert text.count("prompt 1") == 3
    assert text.count("prompt 2") == 1
    assert "scoring failed: ValueError: boom" in text


def test_an_answer_cannot_steer_the_terminal(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(run, capsys, "--episode", str(MAX_SAMPLES + 1))
    assert "\x1b" not in text
    assert r"\x1b[2Jerased" in text
    assert printable("tab\tline\nä\u202e") == "tab\tline\nä\\u202e"


@pytest.mark.parametrize("arguments", [["--group", "9"], ["--episode", "77"]])
def test_what_is_not_there_is_refused(
    run: RunDir, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["episodes", "show", str(run.root), *arguments]) == 2
    assert "no " in capsys.readouterr().err


def test_tokens_are_text_and_coloured_where_the_tokenizer_is_at_hand(
    tmp_path: Path,
    tiny_model_dir: Callable[[], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(tmp_path)
    run.config.write_text(f"model: {{path: {tiny_model_dir()}}}\n")
    group = make_group(0, n_episodes=1)
    letters = np.array([ord(c) - ord("!") for c in "abc"], np.int32)  # a byte-level vocabulary
    logprobs = np.log(np.array([0.9, 0.2, 0.001], np.float32))
    completion = replace(group[0].completion, token_ids=letters, logprobs=logprobs)
    publish_groups(run, [[replace(group[0], completion=completion)]], make_header())
    plain = show(run, capsys, "--episode", "0")
    assert "\n  abc\n" in plain
    assert "least likely: 'c' 0.001, 'b' 0.2, 'a' 0.9" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "a\x1b[33mb\x1b[0m\x1b[1;31mc\x1b[0m" in show(run, capsys, "--episode", "0")
