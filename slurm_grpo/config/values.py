"""Turning text into the types of a dataclass: the YAML side of `loading.py`, and the bounds that
`config.py` gives its numbers.

Knows dataclasses, `Literal`, optional values and tuples, not what any field means. PyYAML's own
guesses are not used (`1e-6` would be a string, `no` a boolean): a scalar is converted from its text
by the field's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

T = TypeVar("T")
_NULL = "tag:yaml.org,2002:null"
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Range(NamedTuple):
    """What a number must be, as `checks/config.py` holds it against and words it."""

    holds: Callable[[Any], bool]
    expected: str


AT_LEAST_0 = Range(lambda x: x >= 0, "at least 0")
AT_LEAST_1 = Range(lambda x: x is None or x >= 1, "at least 1")
BELOW_1 = Range(lambda x: 0 <= x < 1, "at least 0 and below 1")
Count: TypeAlias = Annotated[int, AT_LEAST_0]
Size: TypeAlias = Annotated[int, AT_LEAST_1]
Positive: TypeAlias = Annotated[float, Range(lambda x: x > 0, "more than 0")]


Problem: TypeAlias = tuple[str, str, str]
"""Where the user wrote it (`file:line`, an option, or the file's name), the dotted key or nothing,
and what is wrong with it."""


class BadValue(ValueError):
    """A text that is not of the field's type; says what was expected."""


@functools.cache
def option_types(cls: type, prefix: str = "", *, include_extras: bool = False) -> dict[str, Any]:
    """Every dotted key of a nested dataclass with its type, in the order of the schema; with
    `include_extras`, as annotated."""
    found: dict[str, Any] = {}
    hints = get_type_hints(cls, include_extras=include_extras)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inside = f"{prefix}{field.name}."
            found |= option_types(hint, inside, include_extras=include_extras)  # type: ignore[arg-type]
        else:
            found[prefix + field.name] = hint
    return found


def nearest(key: str, known: Iterable[str], *, prefix: str = "") -> str:
    """A sentence naming the known keys closest to a mistaken one."""
    known = list(known)
    last = key.rpartition(".")[2]
    same_name = [k for k in known if k.rpartition(".")[2] == last]
    close = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        names = {k.rpartition(".")[2]: k for k in known}
        close = [names[name] for name in difflib.get_close_matches(last, names, n=1, cutoff=0.75)]
    if close:
        return f"Did you mean {' or '.join(prefix + k for k in close[:3])}?"
    section = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section] or sorted(
        {k.partition(".")[0] for k in known}
    )
    return f"Known here: {', '.join(prefix + k for k in siblings)}."


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[hint]


def _scalar(hint: Any, text: str) -> Any:
    try:
        if hint is str:
            return text
        if hint is bool:
            return _BOOLS[text.lower()]
        if get_origin(hint) is Literal:
            return {str(choice): choice for choice in get_args(hint)}[text]
        if hint is int:
            number = float(text) if set(text) & set(".eE") else int(text)
            if number != int(number):
                raise ValueError
            return int(number)
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (KeyError, ValueError, OverflowError):
        raise BadValue(f"{text!r} is not {_describe(hint)}") from None


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type inside `X | None`, and whether it was optional."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(h for h in get_args(hint) if h is not type(None)), True
    return hint, False


def convert(hint: Any, values: Sequence[str], *, from_option: bool = False) -> Any:
    """The value of type `hint` written as these texts; raises `BadValue`.

    An option writes `None` for an absent value and repeats texts for a tuple.
    """
    hint, optional = _without_none(hint)
    if get_origin(hint) is tuple:
        return tuple(_scalar(get_args(hint)[0], text) for text in values)
    if len(values) != 1:
        raise BadValue(f"expected {_describe(hint)}, not {len(values)} values")
    if from_option and optional and values[0] == "None":
        return None
    return _scalar(hint, values[0])


class YamlReader:
    """Reads one YAML text into nested dataclasses, collecting what is wrong instead of raising.

    A field that is wrong keeps its default, so that the rest can still be checked.
    """

    def __init__(self, file: str, *, prefix: str = "") -> None:
        """`prefix` is the section, with its dot, whose keys the file holds."""
        self.file = file
        self._prefix = prefix
        self.problems: list[Problem] = []
        """In the order of the file."""
        self.lines: dict[str, int] = {}
        """1-based line of every key given."""

    def read(self, cls: type[T], text: str, base: T | None = None) -> T:
        """An instance of `cls`, with the values of `base` (the defaults) where `text` names none.

        See `problems` afterwards.
        """
        try:
            loader = yaml.SafeLoader(text)  # refuses control characters
            node = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.file}:{mark.line + 1}" if mark else self.file
            self.problems.append((where, "", f"not valid YAML: {error.problem}."))
            node = None
        except yaml.YAMLError as error:
            self.problems.append((self.file, "", f"not valid YAML: {error}."))
            node = None
        return self._section(base or cls(), node, self._prefix)

    def _bad(self, node: yaml.Node, key: str, text: str) -> None:
        self.problems.append((f"{self.file}:{node.start_mark.line + 1}", key, text))

    def _section(self, base: T, node: yaml.Node | None, prefix: str) -> T:
        values: dict[str, Any] = {}
        hints = get_type_hints(type(base))
        if node is None or node.tag == _NULL:
            return base
        if not isinstance(node, yaml.MappingNode):
            keys = ", ".join(hints)
            self._bad(node, prefix.rstrip("."), f"expected a section with the keys {keys}.")
            return base
        for key_node, value_node in node.value:
            name = str(key_node.value)
            key = prefix + name
            if key in self.lines:
                self._bad(key_node, key, f"given twice, first in line {self.lines[key]}.")
            self.lines[key] = key_node.start_mark.line + 1
            if name not in hints:
                inside = option_types(type(base), prefix)  # type: ignore[arg-type]
                hint = nearest(key, dict.fromkeys([*(prefix + n for n in hints), *inside]))
                if "." in name:
                    section, _, rest = name.partition(".")
                    hint = f"Sections are nested: write `{rest}` in the section `{section}:`."
                self._bad(key_node, key, f"unknown key. {hint}")
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = self._section(getattr(base, name), value_node, key + ".")
            else:
                try:
                    values[name] = self._value(hints[name], value_node)
                except BadValue as error:
                    self._bad(value_node, key, f"{error}.")
        return dataclasses.replace(base, **values)  # type: ignore[type-var]

    @staticmethod
    def _value(hint: Any, node: yaml.Node) -> Any:
        inner, optional = _without_none(hint)
        if node.tag == _NULL:
            if optional:
                return None
            raise BadValue("is empty; leave the key out for its default")
        is_tuple = get_origin(inner) is tuple
        if isinstance(node, yaml.ScalarNode):
            if is_tuple:
                raise BadValue(f"{node.value!r} is not a list; write [{node.value!r}]")
            return convert(hint, [node.value])
        texts = [item.value for item in node.value if isinstance(item, yaml.ScalarNode)]
        if is_tuple and isinstance(node, yaml.SequenceNode) and len(texts) == len(node.value):
            return convert(hint, texts)
        expected = "a list of single values" if is_tuple else _describe(inner)
        raise BadValue(f"expected {expected}, not a list or section")
