"""The built-in reward functions: is a completion's answer the target?

Pure functions of (completion text, target), run in the scorer's child process (`scorer_child.py`),
which imports nothing else of weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Judge = Callable[[str, Any], Any]
BUILT_IN = ("exact", "last_number", "regex")

# A sign counts unless it stands between operands, as in 20-13; a comma only between thousands.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]}])[-\u2212+])?"
    r"(?:(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
)


def parse_number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else."""
    try:
        value = Decimal(text.strip().replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def exact(text: str, target: Any) -> bool:
    """The completion is the answer, up to white space around it."""
    return text.strip() == str(target).strip()


def last_number(text: str, target: Any) -> bool:
    """The last number in the completion equals the answer in value: `= 1,024.0` is 1024."""
    numbers = _NUMBER.findall(text)
    return bool(numbers) and parse_number(numbers[-1]) == parse_number(str(target))


def regex_judge(pattern: str) -> Judge:
    """Judge by the last match of `pattern`: its first group if any, as a text or as a number."""
    compiled = re.compile(pattern)

    def regex(text: str, target: Any) -> bool:
        matches = list(compiled.finditer(text))
        if not matches:
            return False
        found = matches[-1][1 if compiled.groups else 0]
        if found is None:
            return False
        value = parse_number(found)
        return exact(found, target) or (value is not None and value == parse_number(str(target)))

    return regex
