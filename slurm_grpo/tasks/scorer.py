"""Reward functions behind a deadline: text and target in, reward and its parts out.

Called by the engine process, off the decoding thread. The functions run in a child process
(`scorer_child.py`), since only a process can be stopped: one that hangs is killed, its episode
marked, and the next starts in a fresh child. Errors are counted, and too many fail the run, so that
a broken function cannot loop for ever. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slurm_grpo.config.schema import ScorerConfig
from slurm_grpo.errors import ConfigError, ScorerLimitExceeded

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
"""A user's module may import much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """What one completion earned."""

    reward: float
    parts: dict[str, float]
    """Unweighted; `correct` is 1.0 for a right answer where the scorer knows."""
    error: str | None
    """Why scoring failed; the reward is then 0.0 and there are no parts."""


class Scorer:
    """One child process that judges completions, for one calling thread at a time.

    The child dies with the thread that started it, at the latest.
    """

    def __init__(self, cfg: ScorerConfig) -> None:
        self._cfg = cfg
        self.n_errors = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start()

    def score(self, items: Sequence[tuple[str, Any]]) -> list[ScoreResult]:
        """One result per (completion text, target), in order.

        An item whose function raises, hangs or ends the process has an `error`. Raises
        `ScorerLimitExceeded` once more than `max_errors` items failed since the start.
        """
        results: list[ScoreResult] = []
        while len(results) < len(items):
            waiting = items[len(results) :]
            connection = self._connection or self._start()
            try:
                connection.send_bytes(json.dumps(waiting).encode())
                for _ in waiting:
                    results.append(self._receive(connection))
                    self._count(results[-1])
            except (EOFError, OSError) as failure:
                code = self._stop()
                reason = (
                    f"took longer than task.scorer.timeout_s = {self._cfg.timeout_s:g} s"
                    if isinstance(failure, TimeoutError)
                    else f"ended its process (exit code {code})"
                )
                results.append(ScoreResult(reward=0.0, parts={}, error=f"the scorer {reason}"))
                self._count(results[-1])
        return results

    def close(self) -> None:
        """End the child; harmless when repeated."""
        self._stop()

    def _receive(self, connection: Connection) -> ScoreResult:
        if not connection.poll(self._cfg.timeout_s):
            raise TimeoutError
        reward, parts, error = json.loads(connection.recv_bytes())
        return ScoreResult(reward=reward, parts=parts, error=error)

    def _count(self, result: ScoreResult) -> None:
        if result.error is None:
            return
        self.n_errors += 1
        log.warning("scoring failed (%d so far): %s", self.n_errors, result.error)
        if self.n_errors > self._cfg.max_errors:
            self._stop()
            raise ScorerLimitExceeded(
                f"task.scorer {self._cfg.name}: {self.n_errors} episodes failed to score, more "
                f"than task.scorer.max_errors = {self._cfg.max_errors}. The last one: "
                f"{result.error}. Correct the function, or raise the limit."
            )

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        settings = {
            "name": self._cfg.name,
            "regex": self._cfg.regex,
            "module_dir": self._cfg.module_dir,
        }
        package_root = str(Path(__file__).parents[2])
        search = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "slurm_grpo.tasks.scorer_child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    json.dumps(settings),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a user's function prints belongs in the log
                env={**os.environ, "PYTHONPATH": search},
            )
        self._connection = Connection(ours.detach())
        try:
            if not self._connection.poll(_START_TIMEOUT_S):
                problem = f"it was not imported within {_START_TIMEOUT_S:g} s"
            else:
                problem = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            problem = f"its process ended while importing it (exit code {self._stop()})"
        if problem is not None:
            self._stop()
            raise ConfigError(
                f"task.scorer.name: {self._cfg.name} cannot be loaded: {problem}. Expected "
                "module:function; the module is looked for in "
                f"{self._cfg.module_dir or 'the installed packages and the current directory'}."
            )
        return self._connection

    def _stop(self) -> int | None:
        """End the child if there is one; its exit code."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return None
        process, self._process = self._process, None
        try:
            process.wait(timeout=0.2)  # reads the end of its input, unless it hangs
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait()
