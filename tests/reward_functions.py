"""Reward functions that test configs name as `module:function`."""

from __future__ import annotations

import time


def share_of_low_bytes(text: str, target: object) -> float:
    """Between 0 and 1, different for nearly every completion: every group has a gradient."""
    data = text.encode()
    return sum(byte < 96 for byte in data) / max(len(data), 1)


def often_equal(text: str, target: object) -> float:
    """0 or 1, and the same for all completions of about every second prompt."""
    return float(bool(text) and ord(text[0]) % 3 == 0)


def always_raises(text: str, target: object) -> float:
    raise RuntimeError("this scorer is broken")


def hangs(text: str, target: object) -> float:
    time.sleep(3600)
    return 0.0


def constant(text: str, target: object) -> float:
    return 0.5
