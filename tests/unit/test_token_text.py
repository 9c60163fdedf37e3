"""Which letters belong to which token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_grpo.analysis.token_text import load_tokenizer, token_texts
from slurm_grpo.run.directory import RunDir


@pytest.mark.parametrize(
    "text", ["plain text", " led by a space", "naïve 😀 日本語\n", "a</s>", ""]
)
def test_pieces_joined_are_the_text_and_whole_characters_each(
    text: str, tmp_path: Path, tiny_model_dir: Callable[[], Path]
) -> None:
    tokenizer = load_tokenizer(RunDir(tmp_path), str(tiny_model_dir()))
    assert tokenizer is not None
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = token_texts(tokenizer, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_completion_cut_inside_a_character_keeps_its_last_piece(
    tmp_path: Path, tiny_model_dir: Callable[[], Path]
) -> None:
    tokenizer = load_tokenizer(RunDir(tmp_path), str(tiny_model_dir()))
    assert tokenizer is not None
    token_ids = tokenizer.encode("a😀", add_special_tokens=False).ids[:-1]
    assert token_texts(tokenizer, token_ids)[0] == "a"
    assert len(token_texts(tokenizer, token_ids)) == len(token_ids)


def test_the_run_s_own_export_serves_when_the_model_is_elsewhere(
    tmp_path: Path, tiny_model_dir: Callable[[], Path]
) -> None:
    run = RunDir(tmp_path)
    assert load_tokenizer(run, "/moved/away") is None
    run.hf_exports.mkdir(parents=True)
    run.hf_export(3).symlink_to(tiny_model_dir())
    assert load_tokenizer(run, "/another/place") is not None
