"""The built-in reward functions: is a completion's answer the target?

Pure functions of (completion text, target), run in the scorer's child process (`scorer_child.py`),
which imports nothing else of weight.

*A number* is read the same in a completion and in an answer:

- Digits of any script, with a point (or the Arabic decimal sign) before decimals: `3.14`, `.5`.
- Thousands only where they are: groups of three, none before a first group of 0, and one separator
  throughout: a comma (`1,024`), a space of any width, broken or not (`12 345`), LaTeX's `{,}` and
  `\\,`, or the Arabic sign. `1,234` is 1234.
- Powers of ten: `1e3`, `2.5E-4`, `2 x 10^3`, `6.02 \\times 10^{23}`, `10` with raised digits.
- Signs: `+`, `-`, the minus sign and the en dash, not the em dash, which is punctuation. One that
  touches its number (or a currency sign between them) counts unless an operand stands right before
  it: `20-13` ends in 13, pages 10\N{EN DASH}20 in 20. One apart from its number, as in `- 5`,
  counts after `=`, `:` and opening brackets, or if there is nothing else; elsewhere it is an
  operator or the mark of a list.
- A comma between digits that separates no thousands (`1,5`) might be a decimal comma or a list. In
  a completion it is a list, whose last number is 5; a text that should be one number is none then,
  so that such an answer is refused at submission.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Judge = Callable[[str, Any], Any]
BUILT_IN = ("exact", "last_number", "regex")

_ONE_FORM = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2012\u2011\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " "),
        "\uff0b": "+",
        "\u066b": ".",
        "\u066c": ",",
    }
)
_SIGN = (
    r"(?:(?<![^\W_])(?<![.)\]}])[-+](?=[$€£¥]?[\d.])"  # touches its number
    r"|(?:(?<=[=≈:(\[{])|(?<=[=≈:(\[{][ ]))[-+][ ]+)"  # or stands apart where no operand can be
)
_DIGITS = (
    r"(?:(?<![\d.])(?!0)\d{1,3}(?P<separator>,|\{,\}|\\,|[ ])\d{3}(?:(?P=separator)\d{3})*(?!\d)"
    r"(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)"
)
_POWER = (
    r"(?:[eE](?P<e>[-+]?\d+)(?![^\W_])"
    r"|[ ]*(?:[x\u00d7*\u00b7\u22c5]|\\times|\\cdot)[ ]*10"
    r"(?:\^(?P<ten>[-+]?\d+|\{[ ]*[-+]?\d+[ ]*\})"
    r"|(?P<raised>[⁺⁻]?[⁰¹²³⁴-⁹]+)))"
)
_UNSIGNED = rf"[$€£¥]?(?P<digits>{_DIGITS}){_POWER}?"
_NUMBER = re.compile(rf"(?P<sign>{_SIGN})?{_UNSIGNED}")
_WHOLE = re.compile(rf"(?P<sign>[-+][ ]*)?{_UNSIGNED}\.?")


def parse_number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else."""
    found = _WHOLE.fullmatch(text.translate(_ONE_FORM).strip())
    return _value(found) if found else None


def _last_number(text: str) -> Decimal | None:
    """The value of the last number in a text."""
    if (whole := parse_number(text)) is not None:
        return whole
    found = None
    for found in _NUMBER.finditer(text.translate(_ONE_FORM)):  # noqa: B007 - the last one
        pass
    return _value(found) if found else None


def _value(found: re.Match[str]) -> Decimal | None:
    digits = found["digits"]
    if separator := found["separator"]:
        digits = digits.replace(separator, "")
    # Raised digits are digits, and their minus the usual one, in this form.
    raised = unicodedata.normalize("NFKC", found["raised"] or "").translate(_ONE_FORM)
    power = found["e"] or (found["ten"] or "").strip("{ }") or raised or "0"
    try:
        value = Decimal(f"{(found['sign'] or '').strip()}{digits}e{power}")
    except InvalidOperation:  # a power of more digits than a Decimal has
        return None
    return value if value.is_finite() else None


def exact(text: str, target: Any) -> bool:
    """The completion is the answer, up to white space around it."""
    return text.strip() == str(target).strip()


def last_number(text: str, target: Any) -> bool:
    """The last number in the completion equals the answer in value: `= 1,024.0` is 1024."""
    value = _last_number(text)
    return value is not None and value == parse_number(str(target))


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
