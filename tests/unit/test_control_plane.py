"""Server and client over real sockets: keys, strangers, lost connections, deadlines, errors."""

from __future__ import annotations

import json
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from slurm_grpo.config.schema import ClusterConfig, Config, ModelConfig
from slurm_grpo.control.client import ControlClient
from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.control.server import ControlServer
from slurm_grpo.errors import DeadlineExceeded, MessageError, Stopped
from slurm_grpo.run.directory import AttemptDir

HOST = "127.0.0.1"
HEARTBEAT_S = 0.1
TIMEOUT_S = 20.0


class Recorder(Scheduler):
    """A scheduler that keeps the messages it was given, and can be told to have a bug."""

    has_bug = False

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.messages: list[tuple[str, int, str, dict[str, Any]]] = []

    def handle(
        self, peer: str, incarnation: int, kind: str, body: dict[str, Any], now: float
    ) -> None:
        if self.has_bug:
            raise ZeroDivisionError("a bug")
        if kind != "heartbeat":
            self.messages.append((peer, incarnation, kind, body))
        super().handle(peer, incarnation, kind, body, now)


class Plane:
    """A served scheduler, and clients that are closed at the end."""

    def __init__(self, attempt: AttemptDir, heartbeat_timeout_s: float = 60.0) -> None:
        cluster = ClusterConfig(heartbeat_timeout_s=heartbeat_timeout_s)
        self.attempt = attempt
        self.scheduler = Recorder(Config(model=ModelConfig(path="none"), cluster=cluster))
        self.server = ControlServer(self.scheduler, attempt, HOST)
        self.keys: dict[str, Any] = json.loads(attempt.control.read_text())
        self.closers: list[Callable[[], None]] = [self.server.close]

    def client(self, peer: str, incarnation: int = 0, address: str | None = None) -> ControlClient:
        client = ControlClient(
            attempt=self.attempt,
            peer=peer,
            incarnation=incarnation,
            address=address,
            heartbeat_s=HEARTBEAT_S,
        )
        self.closers.append(client.close)
        return client

    def close(self) -> None:
        for close in reversed(self.closers):
            close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    plane = Plane(AttemptDir(tmp_path))
    yield plane
    plane.close()


def begin(trainer: ControlClient) -> None:
    trainer.send("begin", next_group=0, n_dropped=0, consumed=[], available=[], spare=0)


# The protocol


def test_trainer_and_engine_go_through_the_door_together(plane: Plane) -> None:
    engine, trainer = plane.client("engine-0"), plane.client("trainer-0")
    engine.send("ready", probe=[])
    begin(trainer)
    trainer.send("open_door", version=0, store="t:1")
    door = engine.wait_for(lambda view: view["door"], TIMEOUT_S, "the door")
    engine.send("at_door", epoch=door["epoch"], version=0)
    trainer.wait_for(lambda view: view["door"]["go"], TIMEOUT_S, "go")
    engine.send("received", epoch=door["epoch"], version=0, digest="abc")
    acks = trainer.wait_for(lambda view: view["door"]["acks"] or None, TIMEOUT_S, "receipts")
    assert acks == {"engine-0": "abc"}
    trainer.send("commit", epoch=door["epoch"], version=0)
    assert engine.wait_for(lambda view: view["committed"], TIMEOUT_S, "the commit") == 0
    engine.send("installed", version=0)
    groups = engine.wait_for(lambda view: view["groups"] or None, TIMEOUT_S, "groups")
    assert groups == list(range(8))


def test_after_a_flush_the_view_takes_account_of_what_was_sent(plane: Plane) -> None:
    engine = plane.client("engine-0")
    trainer = plane.client("trainer-0")
    for i in range(20):
        engine.send("ready", probe=[i])
        engine.flush(TIMEOUT_S)
        trainer.send("progress", step=i)
        trainer.flush(TIMEOUT_S)
        assert trainer.view["engines"]["engine-0"]["probe"] == [i]


def test_wait_for_never_shows_a_view_older_than_what_was_sent_before(plane: Plane) -> None:
    trainer = plane.client("trainer-0")
    for version in range(50):
        trainer.send("open_door", version=version, store="t:1")
        door = trainer.wait_for(lambda view: view["door"], TIMEOUT_S, "the door")
        assert door["version"] == version


def test_the_supervisors_changes_are_pushed_at_once(plane: Plane) -> None:
    engine = plane.client("engine-0")
    started = time.monotonic()
    with plane.server.locked() as scheduler:
        scheduler.request_stop("cancelled by the user", time.monotonic())
    with pytest.raises(Stopped, match="engine-0: cancelled by the user"):
        engine.wait_for(lambda view: None, TIMEOUT_S, "anything")
    assert time.monotonic() - started < 5.0


def test_a_wait_ends_with_a_text_that_names_what_and_whom(plane: Plane) -> None:
    engine, trainer = plane.client("engine-0"), plane.client("trainer-0")
    engine.send("ready", probe=[])
    engine.flush(TIMEOUT_S)
    trainer.send("open_door", version=0, store="t:1")
    trainer.flush(TIMEOUT_S)
    with pytest.raises(DeadlineExceeded) as error:
        trainer.wait_for(lambda view: view["door"]["go"], 0.3, "all engines at the door")
    text = str(error.value)
    assert re.sub(r"heartbeat [\d.]+ s", "heartbeat T s", text) == (
        "trainer-0: waited 0.3 s for all engines at the door. Not at the door: engine-0. "
        f"engine-0 is ready on {socket.gethostname()}, version None, owes 0 groups, heartbeat T s "
        f"ago, log {plane.attempt.log('engine-0')}. Start with {plane.attempt.log('supervisor')}"
    )
    assert engine.poll_for(lambda view: None, 0.05) is None


# Errors


def test_a_message_nobody_understands_is_raised_where_it_was_sent(plane: Plane) -> None:
    engine, other = plane.client("engine-0"), plane.client("trainer-0")
    engine.send("at_door", epoch=1)
    with pytest.raises(MessageError, match="engine-0: at_door: version missing"):
        engine.flush(TIMEOUT_S)
    with pytest.raises(MessageError):
        engine.send("ready", probe=[])
    other.send("progress", step=1)
    other.flush(TIMEOUT_S)
    assert plane.server.n_rejected == 1


def test_a_peer_this_run_does_not_have_is_turned_away(plane: Plane) -> None:
    with pytest.raises(MessageError, match="this run has no engine-7; it has engine-0, trainer-0"):
        plane.client("engine-7")


def test_bytes_that_are_no_message_are_answered_with_an_error(plane: Plane) -> None:
    with raw_client(plane.keys) as peer:
        for frames in ([b"\x00\xff"], [b"[]"], [b"{}", b"{}"], [b'{"peer": 1}']):
            peer.send_multipart(frames)
            assert peer.poll(20_000)
            assert "not a message" in json.loads(peer.recv())["error"]
    plane.client("engine-0").flush(TIMEOUT_S)


def test_an_error_of_the_scheduler_itself_reaches_the_supervisor(
    plane: Plane,
) -> None:
    engine = plane.client("engine-0")
    plane.scheduler.has_bug = True
    engine.send("ready", probe=[])
    plane.server._thread.join(TIMEOUT_S)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        plane.server.check()
    with pytest.raises(ZeroDivisionError, match="a bug"), plane.server.locked():
        pass


def test_a_silent_supervisor_is_noticed(tmp_path: Path) -> None:
    plane = Plane(AttemptDir(tmp_path), heartbeat_timeout_s=2.0)
    engine = plane.client("engine-0")
    plane.server.close()
    with pytest.raises(
        DeadlineExceeded, match=r"no sign of the control plane at tcp://127"
    ) as error:
        engine.wait_for(lambda view: None, TIMEOUT_S, "anything")
    assert f"Read {plane.attempt.log('supervisor')}" in str(error.value)
    with pytest.raises(DeadlineExceeded):
        engine.send("ready", probe=[])
    engine.close()


# Strangers


class RawClient:
    """A DEALER with any keys or none, as a context manager."""

    def __init__(self, address: str, options: dict[str, bytes]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)

    def __enter__(self) -> zmq.Socket[bytes]:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()


def raw_client(keys: dict[str, Any], **changes: bytes) -> RawClient:
    options = {
        "curve_serverkey": keys["server_public_key"].encode(),
        "curve_publickey": keys["client_public_key"].encode(),
        "curve_secretkey": keys["client_secret_key"].encode(),
    }
    return RawClient(keys["address"], options | changes)


def heartbeat(peer: str = "engine-0") -> bytes:
    message = {"peer": peer, "incarnation": 0, "seq": 0, "kind": "heartbeat", "body": {}, "sent": 0}
    return json.dumps(message).encode()


def test_the_keys_are_for_the_users_eyes_only(plane: Plane) -> None:
    assert stat.S_IMODE(plane.attempt.control.stat().st_mode) == 0o600
    assert plane.keys["address"] == plane.server.address
    assert "server_secret_key" not in plane.keys


def test_the_right_keys_are_answered(plane: Plane) -> None:
    with raw_client(plane.keys) as peer:
        peer.send(heartbeat())
        assert peer.poll(20_000)
        assert json.loads(peer.recv())["view"]["groups"] == []


def test_strangers_get_nothing_and_do_no_harm(plane: Plane) -> None:
    public, secret = zmq.curve_keypair()
    other_server, _ = zmq.curve_keypair()
    strangers = [
        RawClient(plane.server.address, {}),  # no encryption
        RawClient(plane.server.address, {"plain_username": b"u", "plain_password": b"p"}),
        raw_client(plane.keys, curve_publickey=public, curve_secretkey=secret),
        raw_client(plane.keys, curve_secretkey=secret),  # the public key alone proves nothing
        raw_client(plane.keys, curve_serverkey=other_server),
    ]
    host, port = plane.server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)
        for stranger in strangers:
            with suppress(zmq.Again):  # turned away already: it has no connection to send on
                stranger.socket.send(heartbeat(), zmq.NOBLOCK)
        deadline = time.monotonic() + 1.0
        for stranger in strangers:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            assert not stranger.socket.poll(left_ms)
    for stranger in strangers:
        stranger.__exit__()
    plane.client("engine-0").flush(TIMEOUT_S)
    plane.server.check()
    assert [message[:3] for message in plane.scheduler.messages] == [("engine-0", 0, "hello")]


# Lost connections


class Proxy:
    """A TCP relay that can swallow what passes and cut every connection."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self.target = (host, int(port))
        self.listener = socket.create_server((HOST, 0))
        self.address = f"tcp://{HOST}:{self.listener.getsockname()[1]}"
        self.is_swallowing = False
        self.n_swallowed_bytes = 0
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            self.connections += [near, far]
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if self.is_swallowing:
                    self.n_swallowed_bytes += len(data)
                else:
                    sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def cut(self) -> None:
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.connections.clear()

    def close(self) -> None:
        self.listener.close()
        self.cut()


def test_messages_lost_with_a_connection_arrive_once_and_in_order(plane: Plane) -> None:
    proxy = Proxy(plane.server.address)
    trainer = plane.client("trainer-0", address=proxy.address)
    for round_ in range(4):
        for i in range(20):
            trainer.send("progress", n=100 * round_ + i)
        proxy.is_swallowing = True
        before = proxy.n_swallowed_bytes
        for i in range(20, 40):
            trainer.send("progress", n=100 * round_ + i)
        deadline = time.monotonic() + TIMEOUT_S
        while proxy.n_swallowed_bytes == before:
            assert time.monotonic() < deadline, "nothing was sent"
            time.sleep(0.01)
        proxy.cut()
        proxy.is_swallowing = False
    trainer.flush(TIMEOUT_S)
    proxy.close()
    received = [body["n"] for _, _, kind, body in plane.scheduler.messages if kind == "progress"]
    assert received == [100 * round_ + i for round_ in range(4) for i in range(40)]


def test_messages_sent_just_before_close_arrive(plane: Plane) -> None:
    trainer = plane.client("trainer-0")
    trainer.send("finish", status="done")
    trainer.close()
    with plane.server.locked() as scheduler:
        assert scheduler.finished == "done"


def test_a_restarted_engine_starts_counting_anew_and_its_predecessor_is_told_to_stop(
    plane: Plane,
) -> None:
    first = plane.client("engine-0", incarnation=0)
    first.send("ready", probe=[])
    first.flush(TIMEOUT_S)
    second = plane.client("engine-0", incarnation=1)
    second.send("ready", probe=[])
    second.flush(TIMEOUT_S)
    with pytest.raises(Stopped, match="replaced by incarnation 1"):
        first.wait_for(lambda view: None, TIMEOUT_S, "anything")
    assert second.view["stop"] is None


def test_an_idle_control_plane_costs_next_to_nothing(plane: Plane) -> None:
    plane.client("engine-0")
    plane.client("trainer-0")

    def seconds_of_a_second() -> float:
        started = time.process_time()
        time.sleep(1.0)
        return time.process_time() - started

    assert any(seconds_of_a_second() < 0.2 for _ in range(3))
