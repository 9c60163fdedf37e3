"""One optimizer step on this rank's groups: pack, forward, backward, clip, AdamW. All methods are
collectives.

Gradients are sums over ranks of losses already divided by the step's global token count, so neither
the number of micro-batches nor of ranks changes the step. Knows nothing of where groups come from
or where weights go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_grpo.algorithms.loss import LossStats, policy_loss, token_stats
from slurm_grpo.config.schema import Config, ScheduleConfig
from slurm_grpo.errors import ConfigError, NonFiniteError
from slurm_grpo.trainer import titan
from slurm_grpo.trainer.attention import build_pack_mask
from slurm_grpo.trainer.batching import StepPacks, build_microbatch
from slurm_grpo.trainer.model import build_adapter, build_model, reshard
from slurm_grpo.types import Group

FLEX_BLOCK = 128


def lr_at(step: int, peak: float, schedule: ScheduleConfig, n_steps: int) -> float:
    """Learning rate of 1-based `step` of `n_steps`: linear warm-up to `peak`, then the configured
    decay, which would end with the step after the last: no step is taken at a rate of 0.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    done = (step - warmup) / (n_steps + 1 - warmup)
    shape = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * shape)


class Learner:
    """The model, its optimizer and the number of steps taken. Needs the default process group."""

    def __init__(self, cfg: Config, device: torch.device) -> None:
        self.cfg = cfg
        self.device = device
        self.step = 0
        """Steps taken, which is also the policy version."""
        self.model = build_model(Path(cfg.model.path), cfg.trainer, device)
        self.adapter = build_adapter(self.model, Path(cfg.model.path))
        optimizer = cfg.trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        for weight in self.model.parameters():
            # Made now rather than in the first step, so that a checkpoint can be read into them.
            self.optimizer.state[weight] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(weight, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
            }
        budget = cfg.trainer.tokens_per_microbatch
        # Flex attention is compiled per shape, so packs on GPUs all have the same one.
        self._pad_to = None if device.type == "cpu" else -(-budget // FLEX_BLOCK) * FLEX_BLOCK

    def set_step(self, step: int) -> None:
        """Continue as after `step` steps; weights and moments have been restored."""
        self.step = step
        reshard(self.model)
        for state in self.optimizer.state.values():
            state["step"].fill_(float(step))

    def plan(self, groups: Sequence[Group]) -> StepPacks:
        """This rank's packs for a step on its `groups`, as many as every other rank has."""
        packs = StepPacks.build(groups, self.cfg.trainer.tokens_per_microbatch)
        # Every step ends with a backward pass: it also drops the gathered weights.
        counts = torch.tensor([max(1, len(packs.learning)), len(packs.quiet)], device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        total = torch.tensor(packs.n_trained_tokens, device=self.device)
        dist.all_reduce(total)
        return packs.padded(*counts.tolist(), n_trained_tokens=int(total))

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take one step on this rank's groups; returns metrics, equal on all ranks but the times.

        Raises `NonFiniteError` on every rank, before any weight changes, when the loss or the
        gradient is not finite.
        """
        started = time.perf_counter()
        packs = self.plan(groups)
        metrics = self.compute_gradients(packs)
        computed = time.perf_counter()
        metrics |= self.apply_gradients(metrics["trainer/loss"])
        return metrics | {
            "trainer/n_trained_tokens": float(packs.n_trained_tokens),
            "trainer/n_microbatches": float(len(packs.learning) + len(packs.quiet)),
            "trainer/forward_backward_s": computed - started,
            "trainer/optimizer_s": time.perf_counter() - computed,
        }

    def compute_gradients(self, packs: StepPacks) -> dict[str, float]:
        """Add the gradient of what `plan` made to the parameters' `.grad`; returns loss and
        statistics, global.

        Groups without a signal (all advantages zero) contribute nothing to the gradient, so they
        are only forwarded, for the statistics.
        """
        stats = LossStats(self.device)
        # Without trained tokens anywhere every weight is zero: the gradient is zero then, not 0/0.
        n_trained_tokens = max(1, packs.n_trained_tokens)
        with torch.no_grad():
            for pack in packs.quiet:
                self._forward(pack, n_trained_tokens, stats)
        for pack in packs.learning:
            self._forward(pack, n_trained_tokens, stats).backward()
        dist.all_reduce(stats.sums_K)
        dist.all_reduce(stats.maxima_K, dist.ReduceOp.MAX)
        return stats.metrics()

    def apply_gradients(self, loss: float) -> dict[str, float]:
        """Clip, check, take the optimizer step at its learning rate, clear the gradients."""
        optimizer = self.cfg.trainer.optimizer
        grad_norm = titan.clip_grad_norm_(
            self.model.parameters(), optimizer.max_grad_norm, foreach=True
        ).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; expected finite "
                f"numbers. The weights are unchanged: lower trainer.optimizer.lr ({optimizer.lr}), "
                f"or look for odd log-probabilities in the step's shards."
            )
        lr = lr_at(self.step + 1, optimizer.lr, self.cfg.trainer.schedule, self.cfg.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"trainer/grad_norm": grad_norm, "trainer/lr": lr}

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability in nats of each token but the first. All ranks pass the same tokens."""
        n_tokens = len(token_ids) - 1
        budget = self.cfg.trainer.tokens_per_microbatch
        if n_tokens > budget:
            raise ConfigError(
                f"trainer.tokens_per_microbatch is {budget}, but log-probabilities of "
                f"{len(token_ids)} tokens were asked for. Raise it to at least {n_tokens}."
            )
        pad = (self._pad_to or n_tokens) - n_tokens
        ids = torch.tensor(token_ids, device=self.device)
        inputs = torch.cat([ids[:-1], ids.new_zeros(pad)])
        order = torch.arange(n_tokens, device=self.device)
        positions = torch.cat([order, order.new_zeros(pad)])
        # Causal order alone keeps the padding out of sight.
        one_group = torch.zeros_like(inputs, dtype=torch.int32)  # as packs: one kernel
        mask = build_pack_mask(one_group, one_group, ((0, n_tokens + pad),))
        parts: list[Tensor] = []

        def keep(logprobs_C: Tensor, entropy_C: Tensor, start: int, stop: int) -> Tensor:
            parts.append(logprobs_C)
            return logprobs_C.sum()

        with torch.no_grad():
            self.model(inputs, positions, mask, order, ids[1:], temperature, keep)
        reshard(self.model)
        values: list[float] = torch.cat(parts).tolist()
        return values

    def _forward(self, pack: list[Group], n_trained_tokens: int, stats: LossStats) -> Tensor:
        batch, algorithm = build_microbatch(pack, self.device, self._pad_to), self.cfg.algorithm

        def chunk_loss(logprobs_C: Tensor, entropy_C: Tensor, start: int, stop: int) -> Tensor:
            part = batch.tokens.slice(start, stop)
            loss = policy_loss(logprobs_C, part, algorithm, n_trained_tokens)
            stats.add(*token_stats(logprobs_C, entropy_C, part, algorithm, loss))
            return loss

        total: Tensor = self.model(
            batch.token_ids_T,
            batch.positions_T,
            batch.mask,
            batch.predict_N,
            batch.targets_N,
            self.cfg.generator.sampling.temperature,
            chunk_loss,
        )
        return total
