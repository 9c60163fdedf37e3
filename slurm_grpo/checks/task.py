"""What is wrong with the task section and the files it names, found at submission.

Called by `checks/config.py`. A user's scorer is looked up without being imported, and rows are
tokenised only if a tokenizer is at hand (the base install has none; the engine then refuses).
"""

from __future__ import annotations

import importlib.machinery
import re
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_grpo.config.schema import Config, ScorerConfig
from slurm_grpo.tasks import judges
from slurm_grpo.tasks.jsonl import Row, read_rows, shortened


def check_task(cfg: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every problem of `cfg.task`, rows included: the dotted keys involved, the one to change
    first, and what is wrong with it."""
    if cfg.run.replay_of is not None:
        return  # its prompts and answers are in the episodes
    for key, text in scorer_problems(cfg.task.scorer):
        yield (f"task.scorer.{key}",), text
    if cfg.task.name != "jsonl":
        return
    if cfg.task.path is None:
        yield (
            ("task.path", "task.name"),
            "missing; task.name = jsonl needs a file of rows with prompt and answer. Add it, or "
            "pass --task.path.",
        )
    for key, name in (("task.path", cfg.task.path), ("task.eval_path", cfg.task.eval_path)):
        if name is None:
            continue
        path = Path(name)
        rows, problems = read_rows(path)
        problems += _answer_problems(path, rows, cfg.task.scorer)
        for problem in problems:
            yield (key,), problem
        for problem in _length_problems(path, rows, cfg):
            yield (key, "model.path", *_LENGTH_KEYS), problem


def scorer_problems(cfg: ScorerConfig) -> Iterator[tuple[str, str]]:
    if cfg.name == "regex":
        try:
            re.compile(cfg.regex or "")
        except re.error as error:
            yield "regex", f"{cfg.regex!r} is no regular expression: {error}."
        if not cfg.regex:
            yield "regex", "missing; task.scorer.name = regex needs a pattern, such as '#### (.*)'."
    elif cfg.name not in judges.BUILT_IN:
        module, colon, function = cfg.name.partition(":")
        names = [*module.split("."), function]
        if not colon or not all(name.isidentifier() for name in names):
            yield (
                "name",
                f"{cfg.name!r} given; expected {', '.join(judges.BUILT_IN)} or module:function.",
            )
        elif (problem := _lookup_problem(module, function, cfg.module_dir)) is not None:
            yield "name", problem


def _lookup_problem(module: str, function: str, module_dir: str | None) -> str | None:
    """Why `module:function` would not import, as far as can be told without running it."""
    path = [*([module_dir] if module_dir else []), str(Path.cwd()), *sys.path]
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            looked = module_dir or "the configuration's directory, the current one"
            return (
                f"no module {'.'.join(parts[: depth + 1])!r} in {looked} or the installed "
                "packages. Set task.scorer.module_dir to the directory that holds it."
            )
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    source = Path(spec.origin).read_bytes()
    try:
        # Bytes too, whatever the stubs say, so that a file may name its own encoding.
        table = symtable.symtable(source, spec.origin, "exec")  # type: ignore[arg-type]
    except (SyntaxError, ValueError) as error:
        return f"{spec.origin} is not valid Python: {error}."
    symbols = table.get_symbols()
    bound = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    if function in bound or re.search(rb"import[\s\\(]*\*", source):
        return None
    functions = {t.get_name() for t in table.get_children() if t.get_type() == "function"} & bound
    return (
        f"{spec.origin} defines no {function!r}; its functions: "
        f"{', '.join(sorted(functions)) or 'none'}."
    )


def _answer_problems(path: Path, rows: list[Row], cfg: ScorerConfig) -> list[str]:
    """Answers that the built-in scorer could never accept."""
    if cfg.name not in judges.BUILT_IN:
        return []
    problems = []
    for row in rows:
        if isinstance(row.answer, bool) or not isinstance(row.answer, str | int | float):
            expected = "a text or number"
        elif cfg.name == "last_number" and judges.parse_number(str(row.answer)) is None:
            expected = "a number, since task.scorer.name = last_number"
            if "," in str(row.answer):
                expected += "; a comma separates thousands only, as in 1,024"
        else:
            continue
        problems.append(f"{path}:{row.line}: `answer` is {row.answer!r}; expected {expected}.")
    return shortened(path, problems)


_LENGTH_KEYS = ("generator.engine.max_model_len", "generator.sampling.max_new_tokens")


def _length_problems(path: Path, rows: list[Row], cfg: Config) -> list[str]:
    """Rows whose prompt cannot fit even without the chat template's own tokens."""
    room = cfg.generator.engine.max_model_len - cfg.generator.sampling.max_new_tokens
    # No tokenizer of the supported families makes more tokens than bytes of a text.
    suspects = [(row, text) for row in rows if len((text := _text(row)).encode()) > room]
    tokenizer = _load_tokenizer(Path(cfg.model.path)) if suspects else None
    if tokenizer is None:
        return []
    problems = []
    for row, text in suspects:
        n = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if n > room:
            problems.append(
                f"{path}:{row.line}: the prompt has {n} tokens; expected at most {room} "
                "(generator.engine.max_model_len - generator.sampling.max_new_tokens). Remove the "
                "row, or raise max_model_len."
            )
    return shortened(path, problems)


def _text(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "".join(message["content"] for message in row.prompt)


def _load_tokenizer(model: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    file = model / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None
