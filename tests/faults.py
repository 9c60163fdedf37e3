"""A broken file system for tests: libc's file calls fail, come short, lie or kill on demand.

`run_broken` runs a function in a child process above `fault_shim.c`; there, `arm` and the others
below tell the shim what to do to which paths.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
MODES = {"fail": 0, "lost reply": 1, "short": 2, "kill": 3}
"""`lost reply`: the call is done, and reported as failed."""


def build_shim(folder: Path) -> Path:
    """The compiled shim; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NOT RUN: no C compiler (cc), so no faults can be injected below libc")
    path = folder / "fault_shim.so"
    source = TESTS / "fault_shim.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, source, "-ldl"],
        check=True,
    )
    return path


def run_broken(shim: Path, function: Callable[..., Any], *arguments: object) -> Any:
    """What `function(*arguments)` returns in a child process above the shim; all of it JSON."""
    code = (
        f"import json, sys; sys.path[:0] = {sys.path!r}; from {function.__module__} import "
        f"{function.__name__} as f; print(json.dumps(f(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def arm(op: str, where: str, nth: int, mode: str, error_number: int = 0) -> None:
    """Let the nth call of `op` on a path with `where` in it go wrong; "any": all that write."""
    ctypes.CDLL(None).fault_arm(op.encode(), where.encode(), nth, MODES[mode], error_number)


def disarm() -> int:
    """Nothing goes wrong any more; how many calls the last `arm` has seen."""
    n_seen: int = ctypes.CDLL(None).fault_seen()
    arm("nothing", "", -1, "fail")
    return n_seen


def hide(where: str, seconds: float, error_number: int) -> None:
    """Paths with `where` in them are not there for some seconds, listings included."""
    until: Any = ctypes.c_double(seconds)
    ctypes.CDLL(None).fault_hide(where.encode(), until, error_number)


def step_clock(seconds: float) -> None:
    """Wall-clock time jumps to `seconds` from the true one."""
    ctypes.CDLL(None).fault_step_clock(ctypes.c_double(seconds))
