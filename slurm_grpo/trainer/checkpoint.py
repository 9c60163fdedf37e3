"""Checkpoints (DCP: model, optimizer, step, RNG) and Hugging Face exports of the trained model.

Every rank calls these together. A checkpoint is assembled beside its place, synced, marked complete
and renamed by rank 0, so that a kill at any instant leaves the former one as the latest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from slurm_grpo.errors import StorageError
from slurm_grpo.fsio import storage_errors, sync_directory, write_durably
from slurm_grpo.run.checkpoints import COMPLETE, complete_steps, partial
from slurm_grpo.run.directory import RunDir
from slurm_grpo.trainer.hf_layers import hf_metadata, iter_hf_layers
from slurm_grpo.trainer.learner import Learner
from slurm_grpo.trainer.model import named_weights

MAX_FILE_BYTES = 4 << 30
"""Size at which an export starts another safetensors file."""


def save_checkpoint(run: RunDir, step: int, learner: Learner) -> None:
    """Write the checkpoint of `step`; complete when this returns. Raises StorageError."""
    path = run.checkpoint(step)
    work = partial(path)
    with storage_errors("write a checkpoint to", work), _dcp_errors("write a checkpoint to", work):
        _lead_alone(lambda: _fresh(work))
        state_dict_saver.save(_state(learner), checkpoint_id=str(work))
        _lead_alone(lambda: _finish(work, path, json.dumps({"step": step}).encode()))


def load_checkpoint(run: RunDir, step: int, learner: Learner) -> None:
    """Restore model, optimizer, step and RNG; the number of ranks may differ from when it was
    written.
    """
    path = run.checkpoint(step)
    state = _state(learner)
    with storage_errors("read the checkpoint", path), _dcp_errors("read the checkpoint", path):
        state_dict_loader.load(state, checkpoint_id=str(path))
    if state["step"] != step:
        raise StorageError(
            f"read the checkpoint {path}: it holds step {state['step']}, not {step}."
        )
    torch.set_rng_state(state["rng"])
    learner.set_step(step)


def prune(run: RunDir, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints. Rank 0 only."""
    for step in complete_steps(run)[: -max(1, keep)]:
        path = run.checkpoint(step)
        (path / COMPLETE).unlink()  # first, so that a half-removed one does not count
        shutil.rmtree(path)


def export_hf(run: RunDir, step: int, learner: Learner) -> Path:
    """Write a Hugging Face directory in the engine's dtype that transformers and vLLM load; returns
    its path.
    """
    path = run.hf_export(step)
    work = partial(path)
    dtype: torch.dtype = getattr(torch, learner.cfg.generator.engine.dtype)
    with storage_errors("export the model to", work):
        _lead_alone(lambda: _fresh(work))
        leads, held = dist.get_rank() == 0, dict[str, Tensor]()
        rows = hf_metadata(learner.model, learner.adapter, dtype)
        plan = split_torch_state_dict_into_shards(
            {name: torch.empty(shape, dtype=dtype, device="meta") for name, _, shape in rows},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_FILE_BYTES,
        )
        for layer in iter_hf_layers(learner.model, learner.adapter, dtype):
            if leads:
                held |= {
                    name: tensor.to(dtype).cpu().contiguous().clone() for name, tensor in layer
                }
                for file, names in plan.filename_to_tensors.items():
                    if held.keys() >= set(names):
                        tensors = {name: held.pop(name) for name in names}
                        save_file(tensors, work / file, metadata={"format": "pt"})
        if leads:
            assert not held, f"tensors in no file of the plan: {sorted(held)}"
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                text = json.dumps(index, indent=1)
                (work / "model.safetensors.index.json").write_text(text)
            _copy_companions(Path(learner.cfg.model.path), work, learner.cfg.generator.engine.dtype)
            _finish(work, path, b"")
        dist.barrier()
    return path


def _state(learner: Learner) -> dict[str, Any]:
    """What a step depends on. DCP writes these tensors, and reads into them in place."""
    weights = named_weights(learner.model)
    moments = {name: learner.optimizer.state[weight] for name, weight in weights.items()}
    return {
        "model": {name: weight.detach() for name, weight in weights.items()},
        "exp_avg": {name: state["exp_avg"] for name, state in moments.items()},
        "exp_avg_sq": {name: state["exp_avg_sq"] for name, state in moments.items()},
        "step": learner.step,
        "rng": torch.get_rng_state(),
    }


@contextmanager
def _dcp_errors(operation: str, path: Path) -> Iterator[None]:
    """DCP wraps a full disk and the like in a BaseException, which no handler of ours would see."""
    try:
        yield
    except CheckpointException as error:
        reasons = {str(failure[0]) for failure in error.failures.values()}
        raise StorageError(f"{operation} {path}: {'; '.join(sorted(reasons))}.") from error


def _lead_alone(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _fresh(work: Path) -> None:
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)


def _finish(work: Path, path: Path, marker: bytes) -> None:
    for file in work.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    write_durably(work / COMPLETE, marker)
    if path.exists():
        shutil.rmtree(path)
    work.rename(path)
    sync_directory(path.parent)


def _copy_companions(model_dir: Path, work: Path, dtype: str) -> None:
    """Configuration and tokenizer of the model it started from, with the dtype of the exported
    weights.
    """
    for file in model_dir.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth")
        if file.is_file() and not weights and not file.name.endswith(".index.json"):
            shutil.copyfile(file, work / file.name)
    config = json.loads((work / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (work / "config.json").write_text(json.dumps(config, indent=2))
