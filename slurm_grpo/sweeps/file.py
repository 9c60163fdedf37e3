"""From SWEEP.yaml to what is varied: the keys and values of every element.

Read on the login node. Promises that everything wrong in the file is reported at once, with its
line, and that random values depend on seed, key and position alone, so that a longer sweep begins
with the shorter one. Knows nothing about the base configuration or about runs.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_origin

import yaml

from slurm_grpo.config import loading as config_io
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import BadValue, convert, nearest, option_types
from slurm_grpo.errors import ConfigError

Changes: TypeAlias = dict[str, str]
"""Dotted key to value, as an option of the command line has it."""
_KINDS = ("grid", "zip", "random")
_KEYS = ("base", "name", *_KINDS, "n", "seed")
_DISTRIBUTIONS = ("uniform", "loguniform", "choice")
_OWN_KEYS = ("run.name", "run.runs_dir")
_MAX_DRAWS = 100
"""Draws for one element of a random sweep, before it is said that there are no further ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What SWEEP.yaml says."""

    file: Path
    base: Path
    name: str
    changes: list[Changes]
    """Of each element, all different, in the order of the file."""


class _Reader:
    """Takes the file apart, collecting what is wrong."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problems: list[tuple[int, str]] = []
        """(line, text)."""
        self.types = {k: t for k, t in option_types(Config).items() if k not in _OWN_KEYS}

    def bad(self, node: yaml.Node, text: str) -> None:
        self.problems.append((node.start_mark.line + 1, text))

    def mapping(self, node: yaml.Node, what: str) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode) or not node.value:
            self.bad(node, f"{what}: expected `key: value` lines.")
            return {}
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.value in found:
                self.bad(key, f"{what}: {key.value} is given twice. Leave one out.")
            found[str(key.value)] = value
        return found

    def items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode) and node.value:
            return list(node.value)
        self.bad(node, f"{what}: expected a list of values, such as [1e-5, 3e-5].")
        return []

    def integer(self, node: yaml.Node | None, key: str, *, default: int, least: int) -> int:
        if node is None:
            return default
        if re.fullmatch(r"\d+", str(node.value)) and int(node.value) >= least:
            return int(node.value)
        self.bad(node, f"{key}: {node.value!r} given; expected an integer of at least {least}.")
        return default

    def varied(self, node: yaml.Node, kind: str) -> dict[str, yaml.Node]:
        """The keys under grid, zip or random that there are."""
        found = self.mapping(node, kind)
        for key, value in found.items():
            if key in _OWN_KEYS:
                self.bad(value, f"{kind}: {key} is chosen by the sweep. Use `name` for its own.")
            elif key not in self.types:
                self.bad(value, f"{kind}: unknown key {key}. {nearest(key, self.types)}")
        return {key: value for key, value in found.items() if key in self.types}

    def text(self, key: str, node: yaml.Node) -> str:
        """A value as on the command line."""
        hint = self.types[key]
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        words = [str(n.value) for n in nodes]
        if node.tag.endswith(":null"):
            words = ["None"]
        try:
            if not all(isinstance(n, yaml.ScalarNode) for n in nodes):
                raise BadValue("expected a value")
            convert(hint, words, from_option=True)
        except BadValue as error:
            self.bad(node, f"{key}: {error}.")
        if key in config_io.DATA_PATHS and words != ["None"] and words[0][:1] not in "~$":
            words = [str(self.file.absolute().parent / words[0])]
        return shlex.join(words) if get_origin(hint) is tuple else words[0]

    def distribution(self, key: str, node: yaml.Node) -> Callable[[random.Random], str]:
        """What draws a value of `key`."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        name = str(pairs[0][0].value) if len(pairs) == 1 else ""
        if name not in _DISTRIBUTIONS:
            wanted = ", ".join(_DISTRIBUTIONS)
            self.bad(node, f"{key}: expected one of {wanted}, as in `{{uniform: [0, 1]}}`.")
            return lambda _: ""
        argument = pairs[0][1]
        items = self.items(argument, f"{key}.{name}")
        if name == "choice":
            choices = [self.text(key, item) for item in items]
            return lambda rng: rng.choice(choices)
        n_problems = len(self.problems)
        bounds = [self.text(key, item) for item in items]
        if len(self.problems) > n_problems or not items:
            return lambda _: ""
        is_int = self.types[key] is int
        if (self.types[key] is not float and not is_int) or len(bounds) != 2:
            self.bad(argument, f"{key}.{name}: expected two numbers, for a key that is a number.")
            return lambda _: ""
        low, high = map(float, bounds)
        if not low < high or (name == "loguniform" and low <= 0):
            zero = "0 < " if name == "loguniform" else ""
            self.bad(argument, f"{key}.{name}: expected {zero}low < high, not {low:g}, {high:g}.")
            return lambda _: ""

        def draw(rng: random.Random) -> str:
            if name == "uniform" and is_int:
                return str(rng.randint(int(low), int(high)))
            if name == "uniform":
                return f"{rng.uniform(low, high):.6g}"
            value = math.exp(rng.uniform(math.log(low), math.log(high)))
            return str(round(value)) if is_int else f"{value:.6g}"

        return draw


def read_sweep(file: Path) -> Sweep:
    """The sweep that a file describes. Raises ConfigError listing every problem."""
    try:
        node = yaml.compose(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the sweep {file}: {error}.") from None
    if node is None:
        raise ConfigError(f"{file}: empty; expected `base` and one of {', '.join(_KINDS)}.")
    reader = _Reader(file)
    top = reader.mapping(node, "sweep")
    for key, value in top.items():
        if key not in _KEYS:
            reader.bad(value, f"unknown key {key}. {nearest(key, _KEYS)}")
        elif key in ("n", "seed") and "random" not in top:
            reader.bad(value, f"{key}: has an effect with `random` only. Leave it out.")
    name = str(top["name"].value) if "name" in top else file.stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        reader.bad(top.get("name", node), f"name: {name!r} cannot be a directory's. Set `name`.")
    if "base" not in top:
        reader.bad(node, "base: missing; expected the path of a configuration.")
    kinds = [kind for kind in _KINDS if kind in top]
    if len(kinds) != 1:
        reader.bad(
            node, f"expected one of {', '.join(_KINDS)}; found {' and '.join(kinds) or 'none'}."
        )
    changes: list[Changes] = []
    if len(kinds) == 1 and (varied := reader.varied(top[kinds[0]], kinds[0])):
        n = reader.integer(top.get("n"), "n", default=1, least=1)
        seed = reader.integer(top.get("seed"), "seed", default=0, least=0)
        changes = _expand(reader, kinds[0], top[kinds[0]], varied, n, seed)
    if reader.problems:
        count = f"{len(reader.problems)} problem{'s' if len(reader.problems) > 1 else ''}"
        lines = [f"  {file}:{line}: {text}" for line, text in sorted(reader.problems)]
        raise ConfigError("\n".join([f"{count} in the sweep {file}:", *lines]))
    base = file.absolute().parent / str(top["base"].value)
    return Sweep(file=file, base=base, name=name, changes=changes)


def _expand(
    reader: _Reader, kind: str, node: yaml.Node, varied: Mapping[str, yaml.Node], n: int, seed: int
) -> list[Changes]:
    if kind == "random":
        draws = {key: reader.distribution(key, value) for key, value in varied.items()}
        if reader.problems:
            return []
        found = list(itertools.islice(_draw(draws, seed, n), n))
        if len(found) < n:
            reader.bad(node, f"random: no more than {len(found)} different elements; n is {n}.")
        return found
    lists = {k: [reader.text(k, v) for v in reader.items(x, k)] for k, x in varied.items()}
    lengths = {key: len(values) for key, values in lists.items()}
    if kind == "zip" and len(set(lengths.values())) > 1:
        words = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        reader.bad(node, f"zip: expected lists of one length; {words} values.")
        return []
    combine = itertools.product if kind == "grid" else zip
    changes = [dict(zip(lists, values, strict=True)) for values in combine(*lists.values())]
    for first, again in itertools.combinations(range(len(changes)), 2):
        if changes[first] == changes[again]:
            reader.bad(
                node, f"{kind}: element {again} repeats {first}, {describe(changes[first])}."
            )
            break
    return changes


def _draw(
    draws: Mapping[str, Callable[[random.Random], str]], seed: int, n: int
) -> Iterator[Changes]:
    """Different elements, each a function of the seed and its position."""
    seen: set[tuple[str, ...]] = set()
    for position in range(n * _MAX_DRAWS):
        element = {k: draw(random.Random(f"{seed} {k} {position}")) for k, draw in draws.items()}
        if (values := tuple(element.values())) not in seen:
            seen.add(values)
            yield element


def describe(changes: Changes) -> str:
    """`trainer.optimizer.lr 1e-5, run.seed 1`."""
    return ", ".join(f"{key} {value}" for key, value in changes.items())
