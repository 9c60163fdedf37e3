"""What `/proc` says about a tree of processes: who belongs to it, and how much memory it takes.
Linux only.

Used by the supervisor (memory) and by local steps (leftovers). Processes come and go while one
looks, so a process that vanishes in between counts as absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (index 0), or None when the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the command name may hold spaces and brackets


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; with the pid it names a process uniquely.
    None: not alive."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def session_members(session: int) -> set[int]:
    """Pids of the processes in a session."""
    return {p for p in _pids() if (f := _stat_fields(p)) is not None and int(f[3]) == session}


def descendants(root: int) -> set[int]:
    """Pids of `root` and everything below it by parenthood, in whatever session."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if (fields := _stat_fields(pid)) is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found, stack = set(), [root]
    while stack:
        pid = stack.pop()
        found.add(pid)
        stack.extend(children.get(pid, ()))
    return found


def pss_bytes(pids: Iterable[int]) -> int:
    """Summed proportional set size; pages that processes share are counted once."""
    total = 0
    for pid in pids:
        try:
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        total += next(
            (int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0
        )
    return total * 1024
