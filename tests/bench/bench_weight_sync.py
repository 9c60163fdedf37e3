"""One JSON line: what a weight update costs, against the raw broadcast of the same bytes over the
same group.

python tests/bench/bench_weight_sync.py MODEL_DIR [--repeats 9] [--bucket-mib N]

The sender is this process, the receiver a real engine in another. Each repeat sends the model's
bytes into staging twice, as tensors of a bucket's size (`transfer`: moving them, nothing else) and
as the model's own (`with_packing`: small tensors are copied into buckets too); broadcasts as many
raw bytes, in one piece and in buckets, of which the faster counts; and installs with requests
running. `verify` is the digests of both sides. A share is the median over the repeats of raw time
by transfer time, each pair taken within a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench_line import print_bench_line, spread
from slurm_grpo.config.schema import (
    Config,
    EngineConfig,
    GeneratorConfig,
    ModelConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from slurm_grpo.control.address import host_address
from slurm_grpo.weights.policy_group import Pipeline, PolicyGroup, make_store
from slurm_grpo.weights.sender import WeightSender

N_RUNNING = 64


def broadcast_raw(group: PolicyGroup, data: torch.Tensor, piece_bytes: int) -> None:
    """Nothing but the bytes, two pieces under way."""
    pipeline = Pipeline(group, 2 * piece_bytes, time.monotonic() + 60)
    for piece in data.split(piece_bytes):
        pipeline.push(piece)
    for _ in pipeline.drain():
        pass


def serve_engine(pipe: Connection, cfg: Config, store_address: str, seed: int) -> None:
    """The receiving process: answers `raw`, `receive` and `install`, each with the Unix time it was
    done.
    """
    import numpy as np

    from slurm_grpo.generator.engine import Engine
    from slurm_grpo.types import Prompt

    engine = Engine(cfg, seed=seed)
    prompt = Prompt(
        task="bench", text="", token_ids=np.arange(1000, 1075, dtype=np.int32), target=None
    )
    raw: torch.Tensor | None = None
    pipe.send("ready")
    for request, argument in iter(pipe.recv, None):
        if request == "receive":
            pipe.send(("posted", time.time()))
            result = engine.receive(store_address, 1, 1, 2, argument)
            pipe.send((result.digest, time.time(), result.verify_s))
        elif request == "raw":
            n_bytes, piece_bytes = argument
            raw = torch.zeros(n_bytes, dtype=torch.uint8) if raw is None else raw
            pipe.send(("posted", time.time()))
            engine._llm.collective_rpc(
                lambda worker, data=raw, piece=piece_bytes: broadcast_raw(
                    worker.weight_transfer_engine._group, data, piece
                )
            )
            pipe.send(("", time.time()))
        else:
            if argument > 0:
                for i in range(N_RUNNING):
                    engine.admit(i, prompt, i, 1)
                for _ in range(8):
                    engine.step()
            started = time.time()
            load_s = engine.install(argument)
            pipe.send((load_s, time.time() - started))
            while engine.n_unfinished:
                engine.step()
    engine.shutdown()
    pipe.send("ended")
    os._exit(0)


def measure(model: Path, repeats: int, bucket_mib: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    cfg = Config(
        model=ModelConfig(path=str(model)),
        generator=GeneratorConfig(
            engine=EngineConfig(kv_cache_gib=0.25), sampling=SamplingConfig(max_new_tokens=24)
        ),
        weight_sync=WeightSyncConfig(bucket_mib=bucket_mib),
    )
    store, address = make_store(host_address())
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    engine = context.Process(target=serve_engine, args=(other_end, cfg, address, 0), daemon=True)
    engine.start()
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()
    }
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    raw = torch.ones(n_bytes, dtype=torch.uint8)
    pipe.recv()
    group: PolicyGroup | None = None
    names = ("transfer", "with_packing", "verify", "raw_whole", "raw_buckets", "load", "pause")
    times: dict[str, list[float]] = {name: [] for name in names}
    senders = {name: WeightSender(cfg.weight_sync) for name in ("transfer", "with_packing")}
    # As wide models have them: tensors that leave from where they lie.
    stream = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
    blocks = {f"block.{i}": part for i, part in enumerate(stream.split(bucket_mib << 19))}
    del stream

    def send(what: str, tensors: dict[str, torch.Tensor], version: int) -> None:
        nonlocal group
        metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        pipe.send(("receive", version))
        pipe.recv()
        if group is None:
            group = PolicyGroup(address, 1, 0, 2, torch.device("cpu"), 60)
        time.sleep(0.05)  # until the receiver has posted its first operation
        started = time.time()
        sent = senders[what].send(group, ([item] for item in tensors.items()), metadata, version)
        digest, ended, verify_s = pipe.recv()
        assert digest == sent.digest
        times[what].append(ended - verify_s - started)
        times["verify"].append(verify_s)

    for version in range(repeats + 1):
        send("transfer", blocks, version)
        send("with_packing", weights, version)
        for name, piece_bytes in (("raw_whole", n_bytes), ("raw_buckets", bucket_mib << 20)):
            pipe.send(("raw", (n_bytes, piece_bytes)))
            pipe.recv()
            time.sleep(0.05)
            started = time.time()
            assert group is not None
            broadcast_raw(group, raw, piece_bytes)
            times[name].append(pipe.recv()[1] - started)
        pipe.send(("install", version))
        load_s, pause_s = pipe.recv()
        times["load"].append(load_s)
        times["pause"].append(pause_s)
    pipe.send(None)
    pipe.recv()
    engine.join()
    del store
    kept = {name: values[1:] for name, values in times.items()}  # the first forms and allocates
    raw_s = [min(pair) for pair in zip(kept["raw_whole"], kept["raw_buckets"], strict=True)]
    shares = {
        name: [fast / took for fast, took in zip(raw_s, kept[name], strict=True)]
        for name in ("transfer", "with_packing")
    }
    return {
        "n_bytes": n_bytes,
        "bucket_mib": bucket_mib,
        "n_running": N_RUNNING,
        "share_of_raw_bandwidth": spread(shares["transfer"]),
        "share_of_raw_bandwidth_medians": round(
            min(statistics.median(kept[name]) for name in ("raw_whole", "raw_buckets"))
            / statistics.median(kept["transfer"]),
            3,
        ),
        "share_with_packing": spread(shares["with_packing"]),
        **{f"{name}_s": spread(values) for name, values in kept.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=WeightSyncConfig().bucket_mib)
    arguments = parser.parse_args()
    values = measure(arguments.model, arguments.repeats, arguments.bucket_mib)
    print_bench_line("weight_sync", {"model": arguments.model.name, **values})


if __name__ == "__main__":
    main()
