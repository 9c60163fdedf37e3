"""One JSON line: what the control plane takes of a step, with 256 engines and 64 trainer ranks.

python tests/bench/bench_coordination.py [--engines 256] [--trainers 64] [--steps 20]

The server and its scheduler run in this process, looked at as the supervisor does. Trainer rank 0
is a real `ControlClient`; the other peers speak the same messages from a few processes, and answer
at once: no models, no files. A step goes from opening the door to having seen every group of it
announced, on-policy, so that nothing overlaps. The peers share the machine's cores with the
server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from bench_line import print_bench_line, spread
from slurm_grpo.config.schema import (
    AlgorithmConfig,
    Config,
    GeneratorConfig,
    RunConfig,
    TrainerConfig,
)
from slurm_grpo.control.client import ControlClient
from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.control.server import ControlServer
from slurm_grpo.control.views import HeldView
from slurm_grpo.peers import LEADER, engine_name, trainer_name
from slurm_grpo.run.directory import AttemptDir
from slurm_grpo.staging.shards import GroupRef, ShardRef

LIMIT_S = 60.0
IDLE_S = 5.0
SUPERVISOR_S = 0.25
PROBE = list(range(1000, 1064))
DIGEST = "0123456789abcdef"


class Peer:
    """A role without its work, in one socket: answers views at once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, keys: Any) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = keys["server_public_key"].encode()
        self.socket.curve_publickey = keys["client_public_key"].encode()
        self.socket.curve_secretkey = keys["client_secret_key"].encode()
        self.socket.linger = 0
        self.socket.connect(keys["address"])
        self._seq = 0
        self._held = HeldView()
        self._done: set[tuple[Any, ...]] = set()
        self._groups: set[int] = set()
        self._n_shards = 0
        self.is_stopped = False
        self.send("hello", host="node17.cluster.example", pid=4711, log=f"/runs/x/{name}.log")
        if name.startswith("engine-"):
            self.send("ready", probe=PROBE)

    def send(self, kind: str, **body: Any) -> None:
        self._seq += 1
        self._send(self._seq, kind, body)

    def heartbeat(self) -> None:
        self._send(0, "heartbeat", {}, sent=self._seq, have=self._held.number)

    def _send(self, seq: int, kind: str, body: dict[str, Any], **extra: int) -> None:
        envelope = {"peer": self.name, "incarnation": 0, "seq": seq, "kind": kind, "body": body}
        self.socket.send(json.dumps({**envelope, **extra}).encode())

    def receive(self) -> None:
        while True:
            try:
                reply = json.loads(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            assert "error" not in reply, reply
            before = self._held.view
            self._held.take(reply)
            if (view := self._held.view) is None or view is before:
                continue
            self.is_stopped = bool(view["stop"])
            if "groups" in view and not self.is_stopped:
                self._answer(view)

    def _answer(self, view: dict[str, Any]) -> None:
        door, committed = view["door"], view["committed"]
        if door:
            key = (door["epoch"], door["version"])
            self._once("at_door", key, epoch=key[0], version=key[1])
            if door["go"]:
                self._once("received", key, epoch=key[0], version=key[1], digest=DIGEST)
        elif committed is not None:
            self._once(
                "installed",
                (committed,),
                version=committed,
                pause_s=0.1234567,
                load_s=0.1234567,
                probe=[-1.2345678901234567] * len(PROBE),
            )
        new = set(view["groups"]) - self._groups
        self._groups = set(view["groups"])
        if new:
            self.send("announce", shard=self._shard(sorted(new), committed or 0).to_json())

    def _once(self, kind: str, key: tuple[int, ...], **body: Any) -> None:
        if (kind, *key) not in self._done:
            self._done.add((kind, *key))
            self.send(kind, **body)

    def _shard(self, group_ids: list[int], version: int) -> ShardRef:
        self._n_shards += 1
        name = f"v{version:06d}-{self.name}-a000-i000-s{self._n_shards:06d}-0123abcd-123456.h5"
        groups = tuple(
            GroupRef(
                group_id=group_id,
                n_tokens=1600,
                oldest_version=version,
                newest_version=version,
                zero_spread=False,
                n_trainable=8,
            )
            for group_id in group_ids
        )
        return ShardRef(
            path=f"episodes/{name}",
            size_bytes=123456,
            crc32=0x0123ABCD,
            attempt=0,
            engine_id=int(self.name.partition("-")[2]),
            groups=groups,
        )


def play_peers(names: list[str], attempt: AttemptDir) -> None:
    """A process of many peers; ends when the control plane says stop."""
    keys = json.loads(attempt.control.read_text())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    peers = {peer.socket: peer for peer in (Peer(context, name, keys) for name in names)}
    poller = zmq.Poller()
    for socket in peers:
        poller.register(socket, zmq.POLLIN)
    next_heartbeat = time.monotonic() + keys["heartbeat_s"]
    while not all(peer.is_stopped for peer in peers.values()):
        left_s = max(0.0, next_heartbeat - time.monotonic())
        for socket, _ in poller.poll(int(1000 * left_s)):
            peers[socket].receive()
        if time.monotonic() >= next_heartbeat:
            next_heartbeat += keys["heartbeat_s"]
            for peer in peers.values():
                peer.heartbeat()
    context.destroy(linger=0)


def lead(attempt: AttemptDir, cfg: Config, pipe: Connection) -> None:
    """Trainer rank 0: for each step its seconds, with the seconds at which its parts were done."""
    client = ControlClient(attempt=attempt, peer=LEADER, incarnation=0)
    client.send("begin", next_group=0, n_dropped=0, consumed=[], available=[], spare=0)
    client.wait_for(
        lambda view: all(e["state"] == "ready" for e in view["engines"].values()),
        LIMIT_S,
        "all engines",
    )
    pipe.send("ready")
    assert pipe.recv() == "go"
    for step in range(cfg.run.steps):
        pipe.send(take_step(client, cfg, step))
    assert pipe.recv() == "end"
    client.close()


def take_step(client: ControlClient, cfg: Config, version: int) -> dict[str, float]:
    """Synchronise `version`, collect the groups it generated."""
    n_groups = cfg.algorithm.groups_per_step
    start = time.perf_counter()
    times: dict[str, float] = {}

    def wait(part: str, predicate: Any) -> Any:
        value = client.wait_for(predicate, LIMIT_S, part)
        times[part] = time.perf_counter() - start
        return value

    client.send("open_door", version=version, store="10.0.0.1:29500")
    door = wait(
        "door_s",
        lambda v: (d := v["door"]) and d["version"] == version and d["go"] and d,
    )
    wait("acks_s", lambda v: (d := v["door"]) and d["acks"].keys() == d["members"].keys())
    client.send("commit", epoch=door["epoch"], version=version)
    wait("installed_s", lambda v: all(e["version"] == version for e in v["engines"].values()))

    def announced(view: dict[str, Any]) -> list[int] | None:
        ids = [group["group_id"] for shard in view["shards"].values() for group in shard["groups"]]
        return ids if len(ids) == n_groups else None

    ids = wait("groups_s", announced)
    client.send("consumed", version=version + 1, group_ids=ids, dropped=[], spare=0)
    client.send("progress", phase=f"step {version + 1}")
    return times


def watch(server: ControlServer, pipe: Connection, seconds: float | None) -> Any:
    """Look at the scheduler as the supervisor does, until the leader says something."""
    deadline = time.monotonic() + (LIMIT_S if seconds is None else seconds)
    while time.monotonic() < deadline:
        if pipe.poll(SUPERVISOR_S):
            return pipe.recv()
        with server.locked() as scheduler:
            scheduler.tick(time.monotonic())
            overdue = scheduler.overdue_peers(time.monotonic())
            scheduler.view(LEADER)
        assert not overdue, overdue
    assert seconds is not None, f"the leader said nothing for {LIMIT_S:.0f} s"
    return None


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_bench(cfg: Config, attempt: AttemptDir, n_processes: int) -> dict[str, Any]:
    """Start everybody, take the steps, then let everybody idle."""
    server = ControlServer(Scheduler(cfg), attempt, "127.0.0.1")
    names = [engine_name(k) for k in range(cfg.generator.n_engines)]
    names += [trainer_name(rank) for rank in range(1, cfg.trainer.n_ranks)]
    fork = multiprocessing.get_context("spawn")
    ours, theirs = fork.Pipe()
    processes = [
        fork.Process(target=play_peers, args=(names[i::n_processes], attempt))
        for i in range(n_processes)
    ]
    processes.append(fork.Process(target=lead, args=(attempt, cfg, theirs)))
    for process in processes:
        process.start()
    try:
        assert watch(server, ours, None) == "ready"
        time.sleep(1.0)
        ours.send("go")
        used_s = cpu_s()
        steps = [watch(server, ours, None) for _ in range(cfg.run.steps)]
        step_cpu_s = (cpu_s() - used_s) / cfg.run.steps
        used_s = cpu_s()
        watch(server, ours, IDLE_S)
        idle_share = (cpu_s() - used_s) / IDLE_S
        ours.send("end")
    finally:
        with server.locked() as scheduler:
            scheduler.request_stop("the bench is over", time.monotonic())
        for process in processes:
            process.join(10)
            process.kill()
        server.close()
    assert server.n_rejected == 0
    steady = steps[2:]
    return {
        "n_engines": cfg.generator.n_engines,
        "n_trainers": cfg.trainer.n_ranks,
        "step_s": spread([times["groups_s"] for times in steady]),
        "until_s": {part: spread([t[part] for t in steady])["median"] for part in steady[0]},
        "server_cpu_per_step_s": round(step_cpu_s, 4),
        "server_cpu_idle_share": round(idle_share, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--trainers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="that the peers share")
    arguments = parser.parse_args()
    cfg = Config(
        run=RunConfig(steps=arguments.steps),
        algorithm=AlgorithmConfig(groups_per_step=arguments.engines),
        generator=GeneratorConfig(n_engines=arguments.engines),
        trainer=TrainerConfig(n_ranks=arguments.trainers),
    )
    with tempfile.TemporaryDirectory() as directory:
        attempt = AttemptDir(Path(directory))
        print_bench_line("coordination", run_bench(cfg, attempt, arguments.processes))


if __name__ == "__main__":
    main()
