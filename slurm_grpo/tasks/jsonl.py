"""The user's own prompts: one JSON object a line, with `prompt` and `answer`.

`prompt` is a text or a list of chat messages; further columns are ignored. Every epoch visits all
rows once, shuffled by (seed, epoch). Rows are checked at submission, all of them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_grpo.config.schema import TaskConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.tasks.base import Message, PromptSpec

NAME = "jsonl"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One accepted line."""

    line: int  # 1-based
    prompt: str | list[Message]
    answer: Any


class JsonlRows:
    """The rows of `task.path` for training and of `task.eval_path` for evaluation."""

    def __init__(self, cfg: TaskConfig, seed: int) -> None:
        self._seed = seed
        self._train = _read_or_raise(cfg.path)
        self._eval = _read_or_raise(cfg.eval_path) if cfg.eval_path is not None else []
        self._epoch = -1
        self._order: list[int] = []

    def train_prompt(self, group_id: int) -> PromptSpec:
        epoch, position = divmod(group_id, len(self._train))
        if epoch != self._epoch:
            self._order = list(range(len(self._train)))
            random.Random(f"{NAME}/{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompt(self._train[self._order[position]])

    def eval_prompts(self, n: int) -> list[PromptSpec]:
        return [self._prompt(row) for row in self._eval[:n]]

    def _prompt(self, row: Row) -> PromptSpec:
        if isinstance(row.prompt, str):
            return PromptSpec(task=NAME, messages=None, text=row.prompt, target=row.answer)
        return PromptSpec(task=NAME, messages=row.prompt, text=None, target=row.answer)


def _read_or_raise(path: str | None) -> list[Row]:
    if path is None:
        raise ConfigError("task.path: missing; expected a file of rows with prompt and answer.")
    rows, problems = read_rows(Path(path))
    if problems:
        raise ConfigError("\n".join(problems))
    return rows


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and `file:line: reason` for each line that cannot be used."""
    rows: list[Row] = []
    problems: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                found = _parse(line, number)
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    problems.append(f"{path}:{number}: {found}")
    except OSError as error:
        return [], [f"{path}: cannot be read ({error.strerror}). Give a file of JSON lines."]
    if not rows and not problems:
        problems.append(
            f'{path}: has no rows; expected lines like {{"prompt": "...", "answer": "..."}}.'
        )
    return rows, shortened(path, problems)


def shortened(path: Path, problems: list[str], limit: int = 20) -> list[str]:
    """The first problems; the others are only counted."""
    more = [f"{path}: {len(problems) - limit} more rows have such problems."]
    return problems[:limit] + more if len(problems) > limit else problems


def _parse(line: bytes, number: int) -> Row | str:
    """The row in a line, or why there is none."""
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1}). Convert the file."
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} in column {error.colno}. Write one object a line."
    except RecursionError:
        return "nested too deeply. Write a flat object."
    except ValueError:  # Python reads no longer ones
        return "a number has more than 4,300 digits. Write it as a text, in quotes."
    if not isinstance(row, dict):
        return f"{type(row).__name__} found; expected an object with `prompt` and `answer`."
    for name in ("prompt", "answer"):
        if name not in row:
            return f"no `{name}`; found {', '.join(map(repr, row)) or 'no keys'}."
    if row["answer"] is None:
        return "`answer` is null; expected a text or number."
    prompt = row["prompt"]
    if isinstance(prompt, str):
        reason = None if prompt.strip() else "`prompt` is empty."
    elif isinstance(prompt, list):
        reason = _message_problem(prompt)
    else:
        reason = f"`prompt` is {type(prompt).__name__}; expected a text or a list of messages."
    try:
        json.dumps([prompt, row["answer"]], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        reason = reason or f"{half} is half a character (a lone surrogate). Write both halves."
    return reason or Row(line=number, prompt=prompt, answer=row["answer"])


def _message_problem(messages: list[Any]) -> str | None:
    if not messages:
        return "`prompt` is an empty list; expected messages."
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"`prompt`[{i}]: expected an object with exactly `role` and `content`."
        if message["role"] not in ROLES:
            return f"`prompt`[{i}]: role {message['role']!r}; expected one of {', '.join(ROLES)}."
        if not isinstance(message["content"], str):
            return f"`prompt`[{i}]: `content` is no text."
    if messages[-1]["role"] == "assistant":
        return "`prompt` ends with the assistant's turn; the model answers the last message."
    return None
