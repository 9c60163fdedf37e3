"""From a YAML file and options to a `Config`, and to its frozen copy in the run directory.

Promises that every problem is reported at once, each with its file and line (or the option) and its
dotted key; that a configuration holds absolute paths only; and that a frozen one reads back equal.
What must hold between values is told by the caller's rules (`checks/`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import (
    BadValue,
    Problem,
    T,
    YamlReader,
    convert,
    nearest,
    option_types,
)
from slurm_grpo.errors import ConfigError
from slurm_grpo.fsio import link_durably, write_durably

DATA_PATHS = ("model.path", "task.path", "task.eval_path", "task.scorer.module_dir")
"""Relative to the configuration file; to the current directory when an option gives them."""
_OTHER_PATHS = ("run.runs_dir", "cluster.python")
"""Relative to the current directory wherever they come from."""
_STRAY = "command line"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")

Finding: TypeAlias = tuple[tuple[str, ...], str]
"""A broken rule: the dotted keys involved, the one to change first, and what is wrong."""
Rules: TypeAlias = Callable[[Config, Collection[str]], Iterable[Finding]]
"""What must hold; rules that involve one of the keys given are left out."""


def _no_rules(cfg: Config, skip: Collection[str]) -> Iterable[Finding]:
    return ()


def read_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    site: Path | None = None,
    base: Config | None = None,
    rules: Rules = _no_rules,
) -> Config:
    """The configuration in `path`, changed by `overrides`: `["--trainer.optimizer.lr", "1e-5"]`.

    `site` is a file of the section `site`; keys that `path` has there too, and options, win over
    it. What nobody names is as in `base`, by default the schema's defaults. Raises `ConfigError`
    listing every problem, those that `rules` finds included.
    """
    readers, base = [reader := _reader(path)], base or Config()
    if site is not None:
        readers.append(_reader(site, prefix="site."))
        base = dataclasses.replace(base, site=_read(readers[-1], base.site, site))
    cfg = _read(reader, base, path)
    problems = [p for r in readers for p in r.problems]
    if any(not key for _, key, _ in problems):  # unreadable: whatever seems missing may be there
        raise ConfigError(_report(path, problems))

    values, wrong_options, flags = _read_options(overrides)
    problems += wrong_options
    cfg = with_values(cfg, values)

    def where(key: str) -> str:
        if key in flags:
            return f"--{key}"
        files = (f"{r.file}:{r.lines[key]}" for r in readers if key in r.lines)
        return next(files, f"{reader.file} (default)")

    cfg, unset = _resolve_paths(cfg, path, flags)
    problems += [(where(key), key, text) for key, text in unset]
    if not cfg.run.name:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "run"
        name = f"{stem}-seed{cfg.run.seed}-{datetime.now():%Y%m%d-%H%M%S}"
        cfg = with_values(cfg, {"run.name": name})
    found = rules(cfg, {key for _, key, _ in problems})
    problems += [(where(keys[0]), keys[0], text) for keys, text in found]
    if problems:
        raise ConfigError(_report(path, problems))
    return cfg


def freeze_config(cfg: Config, path: Path, *, replace: bool = True) -> bool:
    """Write `cfg` as YAML, whole or not at all.

    With `replace=False`, False if the file exists and says something else.
    """
    text = config_yaml(cfg).encode()
    if not replace:
        return link_durably(path, text)
    write_durably(path, text)
    return True


def config_yaml(cfg: Config) -> str:
    """`cfg` as YAML, every value spelled out, sections in the order of the schema."""
    # ASCII: PyYAML writes U+0085 as it is, and reads it back as a line break.
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, width=100)


def read_frozen(path: Path) -> Config:
    """The configuration of a run, as frozen at submission. Types are checked, nothing else.

    Raises ConfigError, also when there is none.
    """
    reader = YamlReader(str(path))
    try:
        cfg = reader.read(Config, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing. Give a directory that a run has made, such as runs/my-run."
        ) from None
    if reader.problems:
        raise ConfigError(_report(path, reader.problems))
    return cfg


def _reader(path: Path, *, prefix: str = "") -> YamlReader:
    return YamlReader(path.name if path.parent == Path(".") else str(path), prefix=prefix)


def _read(reader: YamlReader, base: T, path: Path) -> T:
    try:
        return reader.read(type(base), path.read_text(encoding="utf-8-sig"), base)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the configuration {path}: {reason}. Give the path of a YAML file."
        ) from None


def with_values(section: T, values: Mapping[str, Any]) -> T:
    """A copy of a (nested) dataclass with the values under dotted keys replaced."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            value = with_values(getattr(section, name), {rest: value})
        section = dataclasses.replace(section, **{name: value})  # type: ignore[type-var]
    return section


def _report(path: Path, problems: Sequence[Problem]) -> str:
    """Problems by file and line, then of defaults and options as found."""

    def place(problem: Problem) -> tuple[bool, str, int]:
        line = re.fullmatch(r"(.*):(\d+)", problem[0])
        return (False, line[1], int(line[2])) if line else (True, "", 0)

    lines = [f"{len(problems)} problem{'s'[: len(problems) > 1]} in the configuration {path}:"]
    for where, key, text in sorted(problems, key=place):
        named = "" if not key or where.startswith("--") or where == _STRAY else f"{key}: "
        lines.append(f"  {where}: {named}{text}")
    return "\n".join(lines)


# -- overrides -------------------------------------------------------------------------------------


def _read_options(words: Sequence[str]) -> tuple[dict[str, Any], list[Problem], set[str]]:
    """The values of the options that are right, by dotted key; what is wrong with the others; and
    the keys of all. `--a.b 1 2` and `--a.b=1` are ways to write one."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            options.append(("", [word]))
    good: dict[str, Any] = {}
    problems: list[Problem] = []
    keys = set()
    types = option_types(Config)
    for option, texts in options:
        key, is_negated = _key_of(option)
        keys.add(key)
        section, _, name = key.rpartition(".")
        text = ""
        if not option:
            text = f"expected an option such as --run.steps 40, not {texts[0]!r}"
        elif key not in types:
            text = f"unknown option. {nearest(key, types, prefix='--')}"
        elif types[key] is bool and texts:
            text = f"takes no value; write --{key} or --{section}.no_{name}."
        elif types[key] is bool:
            good[key] = not is_negated
        else:
            try:
                good[key] = convert(types[key], texts, from_option=True)
            except BadValue as error:
                text = f"{error}."
        if text:
            problems.append((option or _STRAY, key, text))
    return good, problems, keys


def _key_of(option: str) -> tuple[str, bool]:
    """The dotted key an option sets, and whether it is the `no_` form of a switch."""
    key = option.removeprefix("--").replace("-", "_")
    types = option_types(Config)
    section, dot, name = key.rpartition(".")
    plain = f"{section}{dot}{name.removeprefix('no_')}"
    if key not in types and types.get(plain) is bool:
        return plain, True
    return key, False


# -- paths -----------------------------------------------------------------------------------------


def _resolve_paths(
    cfg: Config, file: Path, flags: set[str]
) -> tuple[Config, list[tuple[str, str]]]:
    """`cfg` with absolute paths, and (key, problem) for those that name an unset variable."""
    problems = []
    here = Path.cwd()
    if cfg.task.scorer.module_dir is None and ":" in cfg.task.scorer.name:
        extra = [Path(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        directory = _module_dir(cfg.task.scorer.name, [file.absolute().parent, here, *extra])
        cfg = with_values(cfg, {"task.scorer.module_dir": directory})
    for key in (*DATA_PATHS, *_OTHER_PATHS):
        value = attrgetter(key)(cfg)
        if not value or (key == "cluster.python" and "/" not in value):
            continue
        base = file.absolute().parent if key in DATA_PATHS and key not in flags else here
        try:
            cfg = with_values(cfg, {key: os.path.normpath(base / _expand(value))})
        except KeyError as error:
            problems.append(
                (
                    key,
                    f"{value!r} names the environment variable {error.args[0]}, which is not set. "
                    f"Set it, or write ${{{error.args[0]}:-some/default}}.",
                )
            )
    return cfg, problems


def _expand(text: str) -> str:
    """Expand `$VAR`, `${VAR}`, `${VAR:-default}` and a leading `~`; KeyError names an unset one."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        found = os.environ.get(name) or default
        if found is None:
            raise KeyError(name)
        return found

    return os.path.expanduser(_VARIABLE.sub(value, text))


def _module_dir(scorer: str, candidates: Sequence[Path]) -> str | None:
    """The first directory that holds the scorer's top-level module; None: it is installed."""
    top = scorer.partition(":")[0].partition(".")[0]
    for directory in candidates:
        if (directory / f"{top}.py").is_file() or (directory / top).is_dir():
            return str(directory)
    return None
