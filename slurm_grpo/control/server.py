"""Serves the scheduler to the roles over ZeroMQ, in a thread of the supervisor.

Messages come in over one ROUTER socket and go to `Scheduler.handle`, in order and once per (peer,
incarnation). What changed in a view goes out at once, and the whole view in answer to a heartbeat
that shows that the peer holds another. CURVE keys are made anew for every attempt and written, for
the user's eyes only, into the attempt's directory; a connection without that client key gets
nothing. Knows nothing about what messages mean.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.control.views import SentView
from slurm_grpo.errors import MessageError
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.directory import AttemptDir

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Longest sleep of the thread."""
MAX_MESSAGE_BYTES = 64 << 20
ACK_S = 0.02
"""A confirmation waits so long for changes of the peer's view to go along with."""
HEARTBEATS_PER_S = 64
"""More peers than these send theirs less often than every second."""
LINGER_MS = 500
"""How long closing waits for the last views to leave."""


_ENCODER = json.JSONEncoder(separators=(",", ":"))
# Numbers: combining pyzmq's flags anew for each message took a twelfth of the server's time.
_NOWAIT = int(zmq.NOBLOCK)
_NOWAIT_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


@dataclass(slots=True)
class _Session:
    """What is known about one incarnation of a peer's connection."""

    route: bytes = b""  # ROUTER's name for the connection the peer used last
    last_seq: int = 0  # last message handed to the scheduler
    error: str | None = None
    sent: SentView = field(default_factory=SentView)


class ControlServer:
    """Owns the sockets and the thread; `locked` gives the supervisor's own thread the scheduler."""

    def __init__(self, scheduler: Scheduler, attempt: AttemptDir, host: str) -> None:
        """Bind a free port of `host` (a name or an address of this machine) and start serving."""
        self.n_rejected = 0
        """Messages that could not be understood."""
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, int], _Session] = {}
        self._newest: dict[str, int] = {}  # peer -> incarnation
        self._owed: dict[tuple[str, int], float] = {}
        """Whom a confirmation is owed, oldest first, and since when."""
        self._failure: BaseException | None = None
        self._is_closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        self._context = zmq.Context()
        self._server_public, server_secret = zmq.curve_keypair()
        self._client_public, client_secret = zmq.curve_keypair()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(
            "inproc://zeromq.zap.01"
        )  # before the ROUTER: without it every key is let in
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey = server_secret
        self._router.zap_domain = b"slurm_grpo"
        self._router.maxmsgsize = MAX_MESSAGE_BYTES
        self._router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._router.linger = LINGER_MS
        port = self._router.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")
        self.address = f"tcp://{socket.gethostbyname(host)}:{port}"
        """What clients connect to."""
        self._publish_keys(attempt, client_secret)
        self._thread = threading.Thread(target=self._run, name="control-server", daemon=True)
        self._thread.start()

    @contextmanager
    def locked(self) -> Iterator[Scheduler]:
        """The scheduler, with the server held still; what changed is pushed at once afterwards."""
        self.check()
        with self._lock:
            yield self._scheduler
        self._wake()

    def check(self) -> None:
        """Raise what the server's thread died of, if it did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Push what is left to push and end the thread. The key file stays: it opens nothing any
        more.
        """
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._wake_r.close()
        self._wake_w.close()

    def _publish_keys(self, attempt: AttemptDir, client_secret: bytes) -> None:
        content = {
            "address": self.address,
            "server_public_key": self._server_public.decode(),
            "client_public_key": self._client_public.decode(),
            "client_secret_key": client_secret.decode(),
            "heartbeat_timeout_s": self._scheduler.heartbeat_timeout_s,
            "heartbeat_s": max(1.0, self._scheduler.n_peers / HEARTBEATS_PER_S),
        }
        attempt.root.mkdir(parents=True, exist_ok=True)
        write_durably(attempt.control, json.dumps(content).encode(), mode=0o600)

    def _wake(self) -> None:
        with suppress(OSError):  # full of wake-ups already, or closed
            self._wake_w.send(b"x")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as failure:  # raised again by `check`
            log.exception("the control plane's thread died")
            self._failure = failure
        finally:
            self._router.close()
            self._zap.close()
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        wake = self._wake_r.fileno()
        for source in (self._zap, self._router, wake):
            poller.register(source, zmq.POLLIN)
        is_last = False
        while not is_last:
            is_last = self._is_closing  # one more turn: something may have changed since the last
            sleep_s = 0.0 if is_last else ACK_S if self._owed else TICK_S
            ready = dict(poller.poll(int(1000 * sleep_s)))
            if wake in ready:
                self._wake_r.recv(4096)
            if self._zap in ready:
                self._answer_authentication()
            frames = self._receive_all() if self._router in ready else []
            with self._lock:
                replies = self._turn(frames)
            for route, reply in replies:
                self._send(route, reply)

    def _turn(self, frames: list[list[bytes]]) -> list[tuple[bytes, dict[str, Any]]]:
        """Take a batch of messages, holding the lock; returns what to send to which connection."""
        now = time.monotonic()
        self._scheduler.tick(now)
        replies: list[tuple[bytes, dict[str, Any]]] = []
        heard: dict[tuple[str, int], dict[str, Any]] = {}
        for route, *parts in frames:
            try:
                key, extra = self._take(route, parts, now)
            except MessageError as error:
                self.n_rejected += 1
                log.error("refused: %s", error)
                replies.append((route, {"error": str(error)}))
                continue
            heard[key] = heard.get(key, {}) | extra
        changed = self._scheduler.dirty()
        for key in heard:
            self._owed.setdefault(key, now)
        keys = {(peer, self._newest[peer]) for peer in changed if peer in self._newest}
        keys |= {key for key, state in heard.items() if state or self._sessions[key].error}
        keys |= {key for key, since in self._owed.items() if since <= now - ACK_S}
        for key in keys:
            self._owed.pop(key, None)
            session = self._sessions[key]
            reply = {
                "ack": session.last_seq,
                "number": session.sent.number,
                **heard.get(key, {}),
            }
            if session.error is not None:
                reply["error"] = session.error
            elif key[0] in changed or "sent" in reply:
                reply |= session.sent.news(self._scheduler.view(*key), reply.pop("have", None))
            replies.append((session.route, reply))
        return replies

    def _take(
        self, route: bytes, parts: list[bytes], now: float
    ) -> tuple[tuple[str, int], dict[str, Any]]:
        """Hand one message to the scheduler, unless it was before or one before it is missing."""
        envelope = _decode(parts)
        peer, incarnation, seq = envelope["peer"], envelope["incarnation"], envelope["seq"]
        session = self._sessions.setdefault((peer, incarnation), _Session())
        session.route = route
        self._newest[peer] = max(incarnation, self._newest.get(peer, 0))
        if seq in (0, session.last_seq + 1):
            session.last_seq = seq or session.last_seq
            try:
                self._scheduler.handle(peer, incarnation, envelope["kind"], envelope["body"], now)
            except MessageError as error:
                self.n_rejected += 1
                log.error("refused: %s", error)
                session.error = str(error)
        state = {"sent": envelope.get("sent", 0), "have": envelope.get("have", 0)}
        return (peer, incarnation), state if seq == 0 else {}

    def _receive_all(self) -> list[list[bytes]]:
        frames: list[list[bytes]] = []
        while True:
            try:
                frames.append(self._router.recv_multipart(_NOWAIT))
            except zmq.Again:
                return frames

    def _send(self, route: bytes, reply: dict[str, Any]) -> None:
        try:
            self._router.send(route, _NOWAIT_MORE)
            self._router.send(_ENCODER.encode(reply).encode(), _NOWAIT)
        except zmq.Again:
            log.warning(
                "a peer does not read what it is sent; its next heartbeat gets it all again"
            )

    def _answer_authentication(self) -> None:
        """ZAP (ZeroMQ RFC 27): let in who owns this attempt's client key, and nobody else."""
        frames = self._zap.recv_multipart()
        known = (
            len(frames) == 7
            and frames[5] == b"CURVE"
            and z85.encode(frames[6]) == self._client_public
        )
        if not known:
            log.warning("turned away a stranger from %s", frames[3].decode(errors="replace"))
        status = [b"200", b"", b"role"] if known else [b"400", b"not a key of this attempt", b""]
        self._zap.send_multipart([*frames[:2], *status, b""])


def _decode(parts: list[bytes]) -> dict[str, Any]:
    """The envelope around a message: peer, incarnation, seq (0: unnumbered), kind, body."""
    try:
        (part,) = parts
        envelope = json.loads(part)
        types = {"peer": str, "incarnation": int, "seq": int, "kind": str, "body": dict}
        if not all(isinstance(envelope[key], kind) for key, kind in types.items()):
            raise TypeError(f"fields of the wrong type in {str(envelope)[:200]}")
    except (ValueError, KeyError, TypeError) as error:
        raise MessageError(
            f"control plane: not a message: {type(error).__name__}: {error}."
        ) from error
    return dict(envelope)
