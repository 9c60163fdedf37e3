"""One trainer rank of `test_fsdp.py`, as a process: learns from its share, leaves what it got."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from slurm_grpo.errors import NonFiniteError
from slurm_grpo.run.directory import RunDir
from slurm_grpo.trainer.batching import assign_to_ranks, pack_groups
from slurm_grpo.trainer.checkpoint import save_checkpoint
from slurm_grpo.trainer.hf_layers import iter_hf_layers
from slurm_grpo.trainer.learner import Learner
from slurm_grpo.types import Group
from training import copy_weights, hf_gradients, make_config, make_groups

N_STEPS = 2
BUDGET = 40


def step_groups(step: int) -> list[Group]:
    """A large group and a small one: ranks differ in their micro-batches, or have none at all."""
    small = make_groups(1, group_size=2, seed=100 + step)
    (large,) = make_groups(1, group_size=16, seed=200 + step)
    return [[dataclasses.replace(e, group_id=9) for e in large], *small]


def share(groups: list[Group], rank: int, n_ranks: int) -> list[Group]:
    sizes = [sum(len(e.completion.token_ids) for e in group) for group in groups]
    return [groups[i] for i in assign_to_ranks(sizes, n_ranks)[rank]]


def train(model_dir: Path, run: RunDir, rank: int, n_ranks: int) -> dict[str, Any]:
    """Gradients of the first step, then two steps, a checkpoint and an export."""
    learner = Learner(make_config(model_dir, tokens_per_microbatch=BUDGET), torch.device("cpu"))
    mine = share(step_groups(0), rank, n_ranks)
    plan = learner.plan(mine)
    learner.compute_gradients(plan)
    gradients = hf_gradients(learner)
    learner.optimizer.zero_grad()
    metrics = []
    for step in range(N_STEPS):
        groups = share(step_groups(step), rank, n_ranks)
        metrics.append(learner.train_step(groups))
    save_checkpoint(run, N_STEPS, learner)
    exported: dict[str, Tensor] = {}
    for layer in iter_hf_layers(learner.model, learner.adapter, torch.float32):
        exported.update((name, tensor.clone()) for name, tensor in layer)
    return {
        "gradients": gradients,
        "metrics": metrics,
        "logprobs": learner.logprobs(list(range(20, 60))),
        "weights": copy_weights(learner),
        "exported": exported,
        "n_packs": len(pack_groups(mine, BUDGET)),
        "n_microbatches": len(plan.learning),
        "non_finite": fails_on_a_bad_loss(learner, rank),
    }


def fails_on_a_bad_loss(learner: Learner, rank: int) -> bool:
    """Whether this rank raises when only the last rank's data is bad."""
    groups = step_groups(0)[:1]
    if rank == dist.get_world_size() - 1:
        groups = [[dataclasses.replace(e, advantage=math.inf) for e in groups[0]]]
    try:
        learner.train_step(groups)
    except NonFiniteError:
        return True
    return False


def main() -> None:
    model_dir, root, rank, n_ranks = sys.argv[1:]
    store = FileStore(f"{root}/store", int(n_ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(n_ranks))
    run = RunDir(Path(root))
    torch.save(train(Path(model_dir), run, int(rank), int(n_ranks)), f"{root}/rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
