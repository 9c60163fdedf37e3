"""Signals as things the supervisor reads from an inbox: stop now, stop at the next step boundary, a
child ended.

Handlers only note what came and wake the supervisor's one wait; what to do about it is the
supervisor's business.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal arrives (a child's end is one) or the time is over."""
        select.select([self._reader], [], [], timeout_s)
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
