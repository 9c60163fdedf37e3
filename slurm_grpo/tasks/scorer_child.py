"""The process that runs reward functions; its arguments: socket, parent's pid, settings as JSON.

Started by `scorer.py`, which sends batches over a socket and reads one reply per item. It promises
one reply for every item whatever the function raises, and to die with its parent. It imports
neither torch nor numpy; a user's function may.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from slurm_grpo.tasks import judges

_PR_SET_PDEATHSIG = 1
_MAX_ERROR_CHARS = 500
_MAX_PARTS = 64


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def load_judge(name: str, regex: str | None, module_dir: str | None) -> judges.Judge:
    """The reward function of these settings; raises what importing it raises."""
    if name == "exact":
        return judges.exact
    if name == "last_number":
        return judges.last_number
    if name == "regex":
        return judges.regex_judge(regex or "")
    if module_dir is not None:
        sys.path.insert(0, module_dir)
    module, _, function = name.partition(":")
    judge: judges.Judge = getattr(importlib.import_module(module), function)
    return judge


def as_parts(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, parts) of what a reward function returned; raises on what is no reward."""
    if isinstance(value, bool):
        value = {"correct": float(value)}
    elif not isinstance(value, dict):
        value = {"score": value}
    if not value or len(value) > _MAX_PARTS:
        raise ValueError(f"{len(value)} reward parts; expected 1 to {_MAX_PARTS}")
    parts = {str(name)[:64]: float(part) for name, part in value.items()}
    for name, part in parts.items():
        if not math.isfinite(part):
            raise ValueError(f"reward part {name!r} is {part}")
    total = parts.pop("reward", None)
    if total is None:
        total = math.fsum(parts.values())
    return total, parts or {"score": total}


def _judge_one(judge: judges.Judge, text: str, target: Any) -> list[Any]:
    try:
        reward, parts = as_parts(judge(text, target))
        return [reward, parts, None]
    except BaseException as error:  # noqa: BLE001 - a user's function may even call sys.exit
        return [0.0, {}, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]]


def _serve(connection: Connection, judge: judges.Judge) -> None:
    while True:
        try:
            for text, target in json.loads(connection.recv_bytes()):
                connection.send_bytes(json.dumps(_judge_one(judge, text, target)).encode())
        except (EOFError, ConnectionError):  # the parent has no further questions
            return


def main() -> None:
    fd, parent, settings = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    connection = Connection(fd)
    try:
        judge = load_judge(**settings)
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        message = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        connection.send_bytes(json.dumps(message).encode())
        return
    connection.send_bytes(b"null")
    _serve(connection, judge)


if __name__ == "__main__":
    main()
