"""Prompts: pure functions of (seed, group id), held-out sets kept apart, epochs, rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_grpo.checks.task import check_task
from slurm_grpo.config.schema import Config, TaskConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.tasks import addition, sum_digits
from slurm_grpo.tasks.base import PromptSource, PromptSpec
from slurm_grpo.tasks.jsonl import read_rows
from slurm_grpo.tasks.judges import last_number
from slurm_grpo.tasks.registry import build_prompt_source
from slurm_grpo.tasks.render import check_fits, render_prompt


class ByteTokenizer:
    """One token a byte; a template that marks roles."""

    def __init__(self, *, chat_template: str | None = "bytes", bos: bool = False) -> None:
        self.chat_template = chat_template
        self._bos = bos

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        bos = [256] if self._bos and add_special_tokens else []
        return {"input_ids": bos + list(text.encode())}


def question(spec: PromptSpec) -> str:
    assert spec.messages is not None
    return spec.messages[-1]["content"]


@pytest.fixture(params=["addition", "sum_digits"])
def built_in(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def source(name: str, seed: int = 0) -> PromptSource:
    return build_prompt_source(TaskConfig(name=name), seed)  # type: ignore[arg-type]


def test_a_prompt_depends_on_seed_and_group_only(built_in: str) -> None:
    first = [source(built_in).train_prompt(g) for g in range(50)]
    backwards = [source(built_in).train_prompt(g) for g in reversed(range(50))]
    assert first == backwards[::-1]
    assert first != [source(built_in, seed=1).train_prompt(g) for g in range(50)]


def test_prompts_stay_what_they_were() -> None:
    assert [question(source("addition").train_prompt(g)) for g in range(3)] == ADDITION_0_TO_2
    assert [question(p) for p in source("addition").eval_prompts(2)] == HELD_OUT_0_AND_1


ADDITION_0_TO_2 = ["50 + 95", "60 + 14", "36 + 54"]
HELD_OUT_0_AND_1 = ["16 + 95", "77 + 23"]


def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained_on(built_in: str) -> None:
    held_out = {question(p) for p in source(built_in).eval_prompts(10_000)}
    assert held_out == {question(p) for p in source(built_in, seed=5).eval_prompts(10_000)}
    trained = {question(source(built_in).train_prompt(g)) for g in range(5_000)}
    shots = {m["content"] for m in source(built_in).train_prompt(0).messages[:-1]}  # type: ignore[index]
    assert not trained & held_out
    assert not (trained | held_out) & shots


def test_the_other_order_of_a_held_out_sum_is_not_trained_on_either() -> None:
    held_out = {frozenset(question(p).split(" + ")) for p in source("addition").eval_prompts(999)}
    trained = {
        frozenset(question(source("addition").train_prompt(g)).split(" + ")) for g in range(5_000)
    }
    assert not trained & held_out


def test_there_are_enough_held_out_prompts() -> None:
    assert len(source("addition").eval_prompts(128)) == 128
    assert len(addition.held_out()) > 400
    assert len(sum_digits.held_out()) == len(source("sum_digits").eval_prompts(128)) == 22


def test_the_worked_shots_and_the_target_agree_with_the_scorer(built_in: str) -> None:
    spec = source(built_in).train_prompt(0)
    assert spec.messages is not None
    assert [m["role"] for m in spec.messages] == ["user", "assistant"] * 2 + ["user"]
    if built_in == "addition":
        a, b = map(int, question(spec).split(" + "))
        assert spec.target == a + b
        assert spec.messages[1]["content"] == "23 + 14 = 37"
        assert last_number(spec.messages[1]["content"], 37)
    else:
        assert spec.target == sum(map(int, question(spec).rpartition(" ")[2]))
        assert last_number(spec.messages[1]["content"], 11)


def jsonl(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> TaskConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return TaskConfig(name="jsonl", path=str(path), **settings)


def test_every_epoch_visits_all_rows_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    rows = jsonl(tmp_path, [{"prompt": f"p{i}", "answer": i} for i in range(20)])
    prompts = build_prompt_source(rows, 0)
    epochs = [[prompts.train_prompt(20 * e + i).target for i in range(20)] for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == [
        build_prompt_source(rows, 0).train_prompt(20 + i).target for i in range(20)
    ]
    assert epochs[0] != [build_prompt_source(rows, 1).train_prompt(i).target for i in range(20)]


def test_rows_keep_their_chats_texts_and_answers(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rows = [{"prompt": chat, "answer": "so"}]
    cfg = jsonl(tmp_path, rows)
    cfg = TaskConfig(name="jsonl", path=cfg.path, eval_path=cfg.path)
    spec = PromptSpec(task="jsonl", messages=chat, text=None, target="so")
    assert build_prompt_source(cfg, 0).train_prompt(0) == spec
    assert build_prompt_source(cfg, 0).eval_prompts(5) == [spec]


def test_without_held_out_rows_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    assert (
        build_prompt_source(jsonl(tmp_path, [{"prompt": "p", "answer": 1}]), 0).eval_prompts(5)
        == []
    )


def test_rows_that_went_bad_after_submission_are_refused(tmp_path: Path) -> None:
    cfg = jsonl(tmp_path, [{"prompt": "p"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no `answer`"):
        build_prompt_source(cfg, 0)


def test_messages_go_through_the_chat_template_without_further_special_tokens() -> None:
    spec = source("addition").eval_prompts(1)[0]
    prompt = render_prompt(spec, ByteTokenizer(bos=True))
    assert prompt.text.startswith("<user>23 + 14<assistant>23 + 14 = 37<user>")
    assert prompt.text.endswith("<assistant>")
    assert prompt.token_ids.dtype == np.int32
    assert bytes(prompt.token_ids.tolist()) == prompt.text.encode()
    assert prompt.target == spec.target


def test_without_a_chat_template_shots_become_lines_of_text() -> None:
    spec = source("addition").eval_prompts(1)[0]
    prompt = render_prompt(spec, ByteTokenizer(chat_template=None, bos=True))
    assert (
        prompt.text
        == f"Q: 23 + 14\nA: 23 + 14 = 37\nQ: 58 + 27\nA: 58 + 27 = 85\nQ: {question(spec)}\nA:"
    )
    assert prompt.token_ids[0] == 256


def test_a_text_is_wrapped_in_a_chat_only_if_asked() -> None:
    spec = PromptSpec(task="jsonl", messages=None, text="Why?", target="so")
    assert render_prompt(spec, ByteTokenizer()).text == "Why?"
    assert render_prompt(spec, ByteTokenizer(), True).text == "<user>Why?<assistant>"


def test_a_chat_needs_a_chat_template() -> None:
    chat = PromptSpec(
        task="jsonl", messages=[{"role": "user", "content": "?"}], text=None, target=1
    )
    text = PromptSpec(task="jsonl", messages=None, text="Why?", target=1)
    for spec, chat_template in ((chat, False), (text, True)):
        with pytest.raises(ConfigError, match="no chat template"):
            render_prompt(spec, ByteTokenizer(chat_template=None), chat_template)


def test_a_prompt_that_leaves_no_room_for_a_completion_is_refused() -> None:
    spec = PromptSpec(task="jsonl", messages=None, text="12345678", target=1)
    prompt = render_prompt(spec, ByteTokenizer())
    check_fits(prompt, max_new_tokens=4, max_tokens=12)
    with pytest.raises(ConfigError, match=r"a prompt of 8 tokens .* = 4 exceeds 11 tokens"):
        check_fits(prompt, max_new_tokens=4, max_tokens=11)
    empty = render_prompt(PromptSpec(task="t", messages=None, text="", target=1), ByteTokenizer())
    with pytest.raises(ConfigError, match="no tokens"):
        check_fits(empty, max_new_tokens=4, max_tokens=11)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "a\\ud83d", "answer": 1}', r"\ud83d is half a character"),
        ('{"prompt": "a", "answer": ["\\ude00"]}', r"\ude00 is half a character"),
        ('{"prompt": "a", "answer": ' + 5001 * "9" + "}", "more than 4,300 digits"),
    ],
)
def test_a_row_that_no_file_can_hold_is_refused_with_its_line(
    tmp_path: Path, row: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n' + row)
    [problem] = read_rows(path)[1]
    assert problem.startswith(f"{path}:2: ")
    assert reason in problem


def test_an_ambiguous_answer_is_refused_at_submission(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": answer} for answer in ("1,024", "1e3", "1,5")]
    cfg = Config(task=jsonl(tmp_path, rows))
    [(keys, problem)] = check_task(cfg)
    assert keys == ("task.path",)
    assert "rows.jsonl:3: `answer` is '1,5'; expected a number" in problem
    assert "a comma separates thousands only" in problem
