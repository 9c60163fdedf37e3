"""Signals as things the supervisor reads from an inbox: stop now, stop at the next step boundary, a
child ended.

Handlers only note what came and wake the supervisor's one wait; what to do about it is the
supervisor's business. Here is also what tells whether a signal before the time limit comes early
enough.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from slurm_grpo.config.schema import Config

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """A context in which the process's signals are ours; the former handlers come back at its end.
    Main thread only."""

    def __init__(self, kill_now: Callable[[], None]) -> None:
        """`kill_now` runs inside the handler of a second SIGINT: somebody does not want to wait for
        the first."""
        self.stop_signal: int | None = None
        self.boundary_stop = False
        self._kill_now = kill_now
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former: dict[int, Any] = {}
        self._former_fd = -1

    def __enter__(self) -> SignalInbox:
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float, *others: int) -> None:
        """Sleep until a signal arrives (a child's end is one), one of the file descriptors `others`
        is readable, or the time is over."""
        select.select([self._reader.fileno(), *others], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.boundary_stop = True
        elif number in _STOP_SIGNALS:
            if number == signal.SIGINT and self.stop_signal is not None:
                self._kill_now()
            self.stop_signal = self.stop_signal or number


class BoundaryWatch:
    """Measures how long a step boundary and a checkpoint are away at most, from the trainer's
    progress reports."""

    def __init__(self, cfg: Config) -> None:
        self._limit_s = cfg.cluster.signal_s if cfg.cluster.kind == "slurm" else None
        self._step_s = 0.0
        self._save_s = 0.0
        self._saving_since: float | None = None
        self._has_warned = False

    @property
    def longest_s(self) -> float:
        """The longest step plus the longest checkpoint so far."""
        return round(self._step_s + self._save_s, 3)

    def look(self, progress: Mapping[str, Any], now: float) -> str | None:
        """Take the latest report; a warning, once, when `cluster.signal_s` has become too short."""
        step_s = progress.get("trainer/step_s", 0.0)
        self._step_s = max(self._step_s, step_s)
        if progress.get("phase") == "saving a checkpoint":
            self._saving_since = self._saving_since or now
        elif self._saving_since is not None:
            # The next report may come a step later.
            self._save_s = max(self._save_s, now - self._saving_since - step_s)
            self._saving_since = None
        if self._limit_s is None or self._has_warned or self.longest_s <= self._limit_s:
            return None
        self._has_warned = True
        return (
            f"cluster.signal_s: {self._limit_s} s before the time limit is too late; a step has "
            f"taken {self._step_s:.0f} s and a checkpoint {self._save_s:.0f} s. Work since the "
            f"last checkpoint may be lost; submit with at least {2 * self.longest_s:.0f}."
        )
