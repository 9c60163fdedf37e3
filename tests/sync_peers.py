"""Real second processes for weight-sync tests: a sender and engines, told what to do over pipes.

Run as a script it is such a process: one JSON request a line on stdin, one JSON reply a line on
stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slurm_grpo.config.schema import (
    Config,
    EngineConfig,
    GeneratorConfig,
    ModelConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from slurm_grpo.errors import SlurmGrpoError

ROOT = Path(__file__).resolve().parents[1]


class PeerError(Exception):
    """The peer answered with one of our errors; the text begins with its class."""


class Peer:
    """A process started from this file."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def start(self, request: str, **arguments: Any) -> None:
        """Send a request without waiting for its reply."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        self.process.stdin.flush()

    def reply(self) -> Any:
        """Wait for the reply to the oldest request; raises PeerError."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"peer ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]

    def call(self, request: str, **arguments: Any) -> Any:
        self.start(request, **arguments)
        return self.reply()

    def end(self) -> None:
        """Close its input, which ends it; kill it if that does not help."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def peers(*wanted: tuple[str, dict[str, Any]]) -> Iterator[list[Peer]]:
    """Start peers together, wait until all are ready, end them afterwards."""
    started = [Peer(kind, settings) for kind, settings in wanted]
    try:
        for peer in started:
            peer.reply()
        yield started
    finally:
        for peer in started:
            peer.end()


def engine_settings(model: Path, **settings: Any) -> tuple[str, dict[str, Any]]:
    return "engine", {"model": str(model), **settings}


def sync(sender: Peer, engines: list[Peer], model: Path, version: int, epoch: int = 1) -> Any:
    """One whole update of every engine to the weights in `model`; returns the sender's result."""
    address = sender.call("address")
    world_size = 1 + len(engines)
    sender.start("send", model=str(model), version=version, epoch=epoch, world_size=world_size)
    for rank, engine in enumerate(engines, start=1):
        engine.start(
            "receive",
            store=address,
            epoch=epoch,
            first_rank=rank,
            world_size=world_size,
            version=version,
        )
    sent = sender.reply()
    for engine in engines:
        assert engine.reply()["digest"] == sent["digest"]
    for engine in engines:
        engine.call("install", version=version)
    return sent


class SenderPeer:
    """Trainer rank 0's part, on weights read from a model directory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from slurm_grpo.control.address import host_address
        from slurm_grpo.weights.policy_group import make_store
        from slurm_grpo.weights.sender import WeightSender

        self.cfg = WeightSyncConfig(
            bucket_mib=1, transfer_timeout_s=settings.get("timeout_s", 60.0)
        )
        self.store, self.store_address = make_store(host_address())
        self.sender = WeightSender(self.cfg)
        self.group: Any = None

    def address(self) -> str:
        return self.store_address

    def send(
        self,
        model: str,
        version: int,
        epoch: int,
        world_size: int,
        corrupt_bucket: int | None = None,
        pause_s: float = 0.0,
    ) -> dict[str, Any]:
        import torch
        from safetensors.torch import load_file

        if self.group is None or self.group.epoch != epoch:
            group_class = _corrupting_group(corrupt_bucket)
            self.group = group_class(
                self.store_address,
                epoch,
                0,
                world_size,
                torch.device("cpu"),
                self.cfg.transfer_timeout_s,
            )
        weights = load_file(Path(model) / "model.safetensors")
        metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
        n_layers = 0

        def layers() -> Iterator[list[tuple[str, Any]]]:
            nonlocal n_layers
            for name, tensor in weights.items():
                yield [(name, tensor)]
                n_layers += 1
                time.sleep(pause_s / len(weights))

        try:
            result = self.sender.send(self.group, layers(), metadata, version)
        finally:
            assert n_layers == len(weights), "the layers were not drained"
        return {
            "digest": result.digest,
            "n_bytes": result.n_bytes,
            "broadcast_s": result.broadcast_s,
        }


def _corrupting_group(corrupt_bucket: int | None) -> Any:
    """A policy group whose sender flips one bit of one bucket on its way out."""
    from slurm_grpo.weights.policy_group import PolicyGroup

    class CorruptingGroup(PolicyGroup):
        n_buckets = 0

        def start_broadcast(self, tensor: Any, *, deadline: float | None = None) -> Any:
            if (
                len(tensor) > 3000 and tensor.dtype.itemsize == 1
            ):  # a bucket: the metadata is shorter
                if self.n_buckets == corrupt_bucket:
                    tensor = tensor.clone()
                    tensor[12345] ^= 1
                self.n_buckets += 1
            return super().start_broadcast(tensor, deadline=deadline)

    return PolicyGroup if corrupt_bucket is None else CorruptingGroup


class EnginePeer:
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from slurm_grpo.generator.engine import Engine

        cfg = Config(
            model=ModelConfig(path=settings["model"]),
            generator=GeneratorConfig(
                engine=EngineConfig(
                    dtype=settings.get("dtype", "float32"),
                    tensor_parallel=settings.get("tensor_parallel", 1),
                    max_model_len=256,
                    kv_cache_gib=0.05,
                ),
                sampling=SamplingConfig(
                    max_new_tokens=settings.get("max_new_tokens", 24),
                    temperature=settings.get("temperature", 1.0),
                ),
            ),
            weight_sync=WeightSyncConfig(transfer_timeout_s=settings.get("timeout_s", 60.0)),
        )
        self.engine = Engine(cfg, seed=0, load_weights=settings.get("load_weights", False))

    def receive(
        self, store: str, epoch: int, first_rank: int, world_size: int, version: int
    ) -> Any:
        result = self.engine.receive(store, epoch, first_rank, world_size, version)
        return {"digest": result.digest, "n_bytes": result.n_bytes, "transfer_s": result.transfer_s}

    def install(self, version: int) -> Any:
        return self.engine.install(version)

    def probe(self, token_ids: list[int]) -> list[float]:
        return self.engine.probe_logprobs(token_ids)

    def admit(
        self,
        group_id: int,
        token_ids: list[int],
        n: int = 1,
        seed: int = 0,
        greedy: bool = False,
        tag: str = "train",
    ) -> None:
        from slurm_grpo.types import Prompt

        prompt = Prompt(
            task="test", text="", token_ids=np.array(token_ids, dtype=np.int32), target=None
        )
        self.engine.admit(group_id, prompt, seed, n, greedy=greedy, tag=tag)

    def step(self, n: int) -> list[Any]:
        """Up to `n` steps, until nothing is left to do."""
        finished = []
        for _ in range(n):
            finished += self.engine.step()
            if self.engine.n_unfinished == 0:
                break
        return [
            {
                "group_id": group.group_id,
                "tag": group.tag,
                "completions": [
                    {
                        "token_ids": c.token_ids.tolist(),
                        "logprobs": c.logprobs.tolist(),
                        "policy_versions": c.policy_versions.tolist(),
                        "finish_reason": c.finish_reason,
                        "text": c.text,
                        "times": [c.t_submit, c.t_first_token, c.t_finish],
                    }
                    for c in group.completions
                ],
            }
            for group in finished
        ]

    def n_unfinished(self) -> int:
        return self.engine.n_unfinished

    def shutdown(self) -> None:
        self.engine.shutdown()


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not garble the replies
    kinds: dict[str, Any] = {"sender": SenderPeer, "engine": EnginePeer}
    peer = kinds[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"value": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"value": getattr(peer, arguments.pop("request"))(**arguments)}
        except SlurmGrpoError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies, flush=True)
    if isinstance(peer, EnginePeer):
        peer.shutdown()
    os._exit(0)  # a policy group may have an operation pending


if __name__ == "__main__":
    serve()
