"""A role's end of the control plane: sends messages reliably and in order, and holds the role's
latest view.

One thread owns the socket, so heartbeats go out whatever the role is doing. Messages are numbered
and kept until the server has confirmed them; after a lost connection they are sent again, and the
server takes each once. What goes wrong in the thread is raised in the role's next call.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import zmq

from slurm_grpo.control.views import HeldView, View
from slurm_grpo.errors import DeadlineExceeded, MessageError, SlurmGrpoError, Stopped
from slurm_grpo.run.directory import AttemptDir

T = TypeVar("T")

CLOSE_S = 2.0
"""Longest wait for confirmations when closing."""
MAX_LISTED = 8
"""Engines named in an error text."""


class ControlClient:
    """Connection of one role process. Safe to use from several threads."""

    def __init__(
        self,
        *,
        attempt: AttemptDir,
        peer: str,
        incarnation: int,
        address: str | None = None,
        heartbeat_s: float | None = None,
    ) -> None:
        """Connect with the keys in the attempt's directory, say hello, wait for the first view.

        `heartbeat_s` seconds between heartbeats; by default what the server asks for.
        """
        keys = json.loads(attempt.control.read_text())
        self._address: str = address or keys["address"]
        self._peer = peer
        self._incarnation = incarnation
        self._supervisor_log = attempt.log("supervisor")
        self._heartbeat_s: float = heartbeat_s or keys["heartbeat_s"]
        self._timeout_s: float = keys["heartbeat_timeout_s"]
        self._changed = threading.Condition()
        self._unconfirmed: deque[tuple[int, bytes]] = deque()
        self._last_seq = 0  # last number given to a message
        self._handed_over = 0  # last number given to ZeroMQ, as far as the server has not missed it
        self._confirmed = 0  # last number the server has taken, and the view takes account of
        self._held = HeldView()
        self._failure: SlurmGrpoError | None = None
        self._is_closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys["server_public_key"].encode()
        self._socket.curve_publickey = keys["client_public_key"].encode()
        self._socket.curve_secretkey = keys["client_secret_key"].encode()
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._socket.linger = 0
        self._socket.connect(self._address)
        self._thread = threading.Thread(target=self._run, name="control-client", daemon=True)
        self.send("hello", host=socket.gethostname(), pid=os.getpid(), log=str(attempt.log(peer)))
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._held.view is not None or self._failure is not None)
        if self._failure is not None:
            self.close()
            raise self._failure

    @property
    def view(self) -> View:
        """The latest view; to be read, not changed. Never blocks, so it may be older than what was
        just sent.
        """
        self._check()
        assert self._held.view is not None
        return self._held.view

    def send(self, kind: str, **body: Any) -> None:
        """Queue a message; it reaches the scheduler once, in the order of the calls."""
        with self._changed:
            self._check()
            self._last_seq += 1
            self._unconfirmed.append((self._last_seq, self._frame(self._last_seq, kind, body)))
        self._wake()

    def wait_for(self, predicate: Callable[[View], T | None], timeout_s: float, what: str) -> T:
        """Like `poll_for`, but raises DeadlineExceeded, naming `what`, instead of None."""
        value = self.poll_for(predicate, timeout_s)
        if value is None:
            raise DeadlineExceeded(
                f"{self._peer}: waited {timeout_s:g} s for {what}. "
                f"{who_is_missing(self.view)}Start with {self._supervisor_log}"
            )
        return value

    def poll_for(self, predicate: Callable[[View], T | None], timeout_s: float) -> T | None:
        """What `predicate` makes of the view, once that is neither None nor False; None if that
        takes longer.

        Only views are shown to it that take account of everything sent before the call. Raises
        Stopped when the view says stop.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            sent = self._last_seq
        while True:
            view, confirmed = self.view, self._confirmed
            if view["stop"]:
                raise Stopped(f"{self._peer}: {view['stop']}.")
            value = predicate(view) if confirmed >= sent else None
            if value is not None and value is not False:
                return value
            with self._changed:
                while (
                    self._held.view is view
                    and self._confirmed == confirmed
                    and self._failure is None
                ):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(left)

    def flush(self, timeout_s: float) -> None:
        """Return once the scheduler has taken everything sent so far; `view` is then as new."""
        with self._changed:
            sent = self._last_seq
            self._changed.wait_for(
                lambda: self._confirmed >= sent or self._failure is not None, timeout_s
            )
            self._check()
            if self._confirmed < sent:
                raise DeadlineExceeded(
                    f"{self._peer}: {sent - self._confirmed} messages not confirmed by the control "
                    f"plane at {self._address} within {timeout_s:g} s. "
                    f"Start with {self._supervisor_log}"
                )

    def close(self) -> None:
        """Wait briefly for confirmations, then end the thread. Never raises; harmless when called
        twice.
        """
        if self._is_closing:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._confirmed >= self._last_seq or self._failure is not None, CLOSE_S
            )
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._wake_r.close()
        self._wake_w.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        with suppress(OSError):  # full of wake-ups already, or closed
            self._wake_w.send(b"x")

    def _frame(self, seq: int, kind: str, body: dict[str, Any], **extra: int) -> bytes:
        envelope = {
            "peer": self._peer,
            "incarnation": self._incarnation,
            "seq": seq,
            "kind": kind,
            "body": body,
            **extra,
        }
        return json.dumps(envelope).encode()

    def _run(self) -> None:
        try:
            self._talk()
        except SlurmGrpoError as failure:
            self._fail(failure)
        except BaseException as failure:  # noqa: BLE001 - raised again in the role's thread
            self._fail(
                SlurmGrpoError(f"{self._peer}: the control client's thread died: {failure!r}."),
                failure,
            )
        finally:
            self._socket.close()
            self._context.term()

    def _fail(self, failure: SlurmGrpoError, cause: BaseException | None = None) -> None:
        failure.__cause__ = cause
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _talk(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        wake = self._wake_r.fileno()
        poller.register(wake, zmq.POLLIN)
        heard = turn = time.monotonic()
        next_heartbeat = turn
        while not self._is_closing:
            ready = dict(poller.poll(max(0, int(1000 * (next_heartbeat - turn)))))
            last_turn, turn = turn, time.monotonic()
            if wake in ready:
                self._wake_r.recv(4096)
            if self._socket in ready:
                heard = turn
                self._receive_all()
            elif turn - last_turn > self._heartbeat_s + 4.0:
                heard = turn  # this process was stopped for a while: the server is not to blame
            if turn - heard > self._timeout_s:
                raise DeadlineExceeded(
                    f"{self._peer}: no sign of the control plane at {self._address} for "
                    f"{turn - heard:.0f} s (cluster.heartbeat_timeout_s). Is the supervisor alive? "
                    f"Read {self._supervisor_log}"
                )
            self._hand_over()
            if turn >= next_heartbeat:
                next_heartbeat = turn + self._heartbeat_s
                self._try_send(self._frame(0, "heartbeat", {}, **self._state()))

    def _state(self) -> dict[str, int]:
        """What the server compares with what it did: messages handed over, view held."""
        return {"sent": self._handed_over, "have": self._held.number}

    def _hand_over(self) -> None:
        with self._changed:
            waiting = [item for item in self._unconfirmed if item[0] > self._handed_over]
        for seq, frame in waiting:
            if not self._try_send(frame):
                return
            self._handed_over = seq

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False  # no connection: the next turn tries again
        return True

    def _receive_all(self) -> None:
        while True:
            try:
                reply = json.loads(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._take(reply)

    def _take(self, reply: dict[str, Any]) -> None:
        """A reply confirms messages, and may bring a view or changes to it, an error, or news that
        messages were lost.
        """
        if "error" in reply:
            raise MessageError(reply["error"])
        with self._changed:
            while self._unconfirmed and self._unconfirmed[0][0] <= reply["ack"]:
                self._unconfirmed.popleft()
            if reply["ack"] < reply.get("sent", 0):
                # Heartbeats overtake nothing: what was sent before this one is lost.
                self._handed_over = reply["ack"]
            if self._held.take(reply):  # else the view does not take account of them
                self._confirmed = max(self._confirmed, reply["ack"])
            self._changed.notify_all()


def who_is_missing(view: View) -> str:
    """The engines behind a wait of the trainer, those not heard from for longest first; empty for
    others' views.
    """
    engines: dict[str, View] = view.get("engines", {})
    if not engines:
        return ""
    door = view.get("door")
    text = ""
    if door:
        column = "acks" if door["go"] else "arrived"
        missing = [name for name in door["members"] if name not in door[column]]
        where = "confirmed" if door["go"] else "at the door"
        text = f"Not {where}: {', '.join(missing) or 'nobody'}. "
    ages: dict[str, float] = view["heartbeat_ages_s"]
    rows = sorted(engines.items(), key=lambda row: -ages[row[0]])
    listed = [
        f"{name} is {e['state']} on {e['host'] or 'no host yet'}, version {e['version']}, "
        f"owes {len(e['groups'])} groups, heartbeat {ages[name]} s ago, "
        f"log {e['log'] or 'none yet'}"
        for name, e in rows[:MAX_LISTED]
    ]
    more = f"; and {len(rows) - MAX_LISTED} more" if len(rows) > MAX_LISTED else ""
    return f"{text}{'; '.join(listed)}{more}. "
