"""Time limits as Slurm writes them."""

from __future__ import annotations

import re

_FORMS = (
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
_UNIT_S = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def limit_seconds(text: str) -> int | None:
    """Seconds in `30` (minutes), `30:00`, `4:00:00`, `2-0`, `2-12:30` or `2-12:30:00`; None for
    anything else, such as `UNLIMITED`."""
    for form in _FORMS:
        if match := re.fullmatch(form, text):
            return sum(_UNIT_S[unit] * int(n) for unit, n in match.groupdict().items() if n)
    return None
