"""The elements of a sweep: their configurations, run directories and the manifest that names them.

Each element is an ordinary run in `<runs_dir>/<sweep>/<sweep>-<index>/`. Promises that nothing is
written while anything is wrong with any element, and that an element, once written, never changes
or moves. Knows nothing about how elements are run.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin

from slurm_grpo.checks.load import load_config
from slurm_grpo.config import loading as config_io
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import convert, option_types
from slurm_grpo.errors import ConfigError
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import MANIFEST, find_directory
from slurm_grpo.sweeps.file import Changes, Sweep, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One run of a sweep."""

    index: int
    run: RunDir
    changes: Changes
    config: Config


def plan_elements(sweep: Sweep, overrides: Sequence[str], site: Path | None) -> list[Element]:
    """Every element with its configuration, old ones (of the manifest) first and unchanged.

    `overrides` change the base, as on the command line of submit.py. Raises ConfigError with one
    report about all elements.
    """
    base = config_io.read_config(sweep.base, overrides, site=site)
    folder = Path(base.run.runs_dir) / sweep.name
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"name: {folder} is a run, which a sweep cannot be too. Give the sweep another `name`."
        )
    old = read_manifest(folder)
    _refuse_changes(sweep, folder, old)
    known = [element["changes"] for element in old]
    new = [changes for changes in sweep.changes if changes not in known]
    elements = []
    problems: defaultdict[str, set[int]] = defaultdict(set)
    for index, changes in enumerate([*known, *new]):
        name = f"{sweep.name}-{index:03}"
        own = {"run.runs_dir": str(folder), "run.name": name}
        try:
            config = load_config(sweep.base, [*overrides, *_options(changes | own)], site=site)
        except ConfigError as error:
            for line in str(error).splitlines()[1:] or [str(error)]:
                problems[line.strip()].add(index)
            continue
        run = RunDir(folder / name)
        for line in _differences(run, config):
            problems[line].add(index)
        elements.append(Element(index=index, run=run, changes=changes, config=config))
    if problems:
        raise ConfigError(_report(sweep, problems, len(known) + len(new)))
    return elements


def _report(sweep: Sweep, problems: Mapping[str, set[int]], n_elements: int) -> str:
    """A problem that several elements share is told once."""
    n_bad = len(set[int]().union(*problems.values()))
    lines = [f"{n_bad} of {n_elements} elements of {sweep.file} cannot run:"]
    for text, indices in problems.items():
        whose = "all" if len(indices) == n_elements else compress(indices)
        lines.append(f"  [{whose}] {text}")
    return "\n".join(lines)


def _options(changes: Changes) -> list[str]:
    words: list[str] = []
    types = option_types(Config)
    for key, text in changes.items():
        if types[key] is bool:
            section, _, name = key.rpartition(".")
            words.append(f"--{key}" if convert(bool, [text]) else f"--{section}.no_{name}")
        elif get_origin(types[key]) is tuple:
            words += [f"--{key}", *shlex.split(text)]
        else:
            words += [f"--{key}={text}"]
    return words


def _refuse_changes(sweep: Sweep, folder: Path, old: Sequence[Mapping[str, Any]]) -> None:
    gone = [element for element in old if element["changes"] not in sweep.changes]
    if gone:
        raise ConfigError(
            f"{sweep.file}: no longer holds element {gone[0]['index']} of {folder} "
            f"({describe(gone[0]['changes'])}), nor {len(gone) - 1} others. A sweep may be "
            "extended, not changed: put the values back, or give the new sweep another `name`."
        )


def _differences(run: RunDir, config: Config) -> list[str]:
    """Why a run that exists is not the one that `config` describes; it may have become longer."""
    if not run.config.is_file():
        return []
    frozen = config_io.read_frozen(run.config)
    found = []
    for key in option_types(Config):
        was, now = attrgetter(key)(frozen), attrgetter(key)(config)
        if was != now and not (key == "run.steps" and was > now):
            found.append(
                f"{key}: {now} now, but {was} when the sweep was made. Put it back (or pass the "
                "same options again), or give the new sweep another `name`."
            )
    return found


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """Elements of the sweep in `folder`, as written; none if there is no sweep."""
    path = folder / MANIFEST
    if not path.is_file():
        return []
    try:
        return list(json.loads(path.read_text())["elements"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path}: not a sweep's manifest ({error!r}). Remove it.") from None


def write_elements(folder: Path, elements: Sequence[Element]) -> None:
    """Make run directories with their frozen configurations, then the manifest that names them."""
    for element in elements:
        element.run.create()
        if not element.run.config.is_file():
            config_io.freeze_config(element.config, element.run.config, replace=False)
    rows = [{"index": e.index, "run_dir": str(e.run.root), "changes": e.changes} for e in elements]
    text = json.dumps({"elements": rows}, indent=1)
    write_durably(folder / MANIFEST, (text + "\n").encode())


def compress(indices: Iterable[int]) -> str:
    """`0-3,5`, as Slurm writes it."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def find_sweep(text: str) -> list[Element]:
    """The elements of the sweep that a person names: a directory, or a name under runs/.

    Raises ConfigError. Elements are looked for beside the manifest, wherever it was copied to.
    """
    folder = find_directory(text, MANIFEST, "sweep").absolute()
    return [
        Element(
            index=int(row["index"]),
            run=(run := RunDir(folder / Path(row["run_dir"]).name)),
            changes=dict(row["changes"]),
            config=config_io.read_frozen(run.config),
        )
        for row in read_manifest(folder)
    ]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """By dotted key, its last part, with as many before it as tell it from the others."""
    names = {}
    for key in dict.fromkeys(keys):
        parts = key.split(".")
        for n in range(1, len(parts) + 1):
            short = ".".join(parts[-n:])
            if sum(other == short or other.endswith(f".{short}") for other in set(keys)) == 1:
                break
        names[key] = short
    return names
