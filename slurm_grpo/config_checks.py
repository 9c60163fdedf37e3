"""What must hold between the values of a configuration, and between it and the files it names.

Called by `config_io.py`, which knows where each value was written. Every rule's text has three
parts: the key with its value, what was expected, what to do. Imports nothing heavy, so that the
login node can ask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_grpo import model_support
from slurm_grpo.config import Config
from slurm_grpo.config_cluster_checks import check_cluster
from slurm_grpo.tasks import checks as task_checks


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One broken rule."""

    keys: tuple[str, ...]
    """The values involved, the one to change first."""
    text: str
    """Begins with the first key."""


@dataclass(frozen=True, slots=True)
class _Range:
    """What one number must be."""

    holds: Callable[[Any], bool]
    expected: str


def _at_least(bound: float) -> _Range:
    return _Range(lambda x: x >= bound, f"at least {bound:g}")


_POSITIVE = _Range(lambda x: x > 0, "more than 0")
_SHARE = _Range(lambda x: 0 <= x <= 1, "between 0 and 1")
_BELOW_ONE = _Range(lambda x: 0 <= x < 1, "at least 0 and below 1")

_RANGES: dict[str, _Range] = {
    "run.seed": _Range(lambda x: 0 <= x < 2**32, "at least 0 and below 2**32"),
    "run.steps": _at_least(1),
    "task.scorer.timeout_s": _POSITIVE,
    "task.scorer.max_errors": _at_least(0),
    "evaluation.n_prompts": _at_least(0),
    "evaluation.every_steps": _at_least(0),
    "algorithm.groups_per_step": _at_least(1),
    "algorithm.group_size": _Range(
        lambda x: x >= 2, "at least 2, since an advantage compares the episodes of a group"
    ),
    "algorithm.clip_low": _Range(lambda x: 0 < x < 1, "between 0 and 1, such as 0.2"),
    "algorithm.clip_high": _Range(lambda x: x > 0, "more than 0, such as 0.28"),
    "algorithm.max_staleness": _at_least(0),
    "algorithm.max_dropped_per_step": _at_least(0),
    "generator.sampling.temperature": _Range(
        lambda x: x > 0, "more than 0: greedy episodes of a group would all be the same"
    ),
    "generator.sampling.max_new_tokens": _at_least(1),
    "generator.engine.tensor_parallel": _at_least(1),
    "generator.engine.max_model_len": _at_least(2),
    "generator.engine.max_num_seqs": _at_least(1),
    "generator.engine.max_num_batched_tokens": _at_least(1),
    "generator.engine.kv_cache_gib": _POSITIVE,
    "generator.engine.gpu_memory_utilization": _Range(
        lambda x: 0 < x <= 1, "more than 0 and at most 1"
    ),
    "generator.engine.block_size": _Range(
        lambda x: x > 0 and x % 32 == 0, "a multiple of 32, such as 32"
    ),
    "generator.threads": _at_least(1),
    "generator.publish_groups": _at_least(1),
    "generator.publish_after_s": _POSITIVE,
    "generator.max_restarts": _at_least(0),
    "generator.restart_backoff_s": _at_least(0),
    "staging.keep_steps": _Range(lambda x: x is None or x >= 1, "at least 1"),
    "trainer.n_ranks": _at_least(1),
    "trainer.tokens_per_microbatch": _at_least(2),
    "trainer.threads": _at_least(1),
    "trainer.wait_for_groups_s": _POSITIVE,
    "trainer.optimizer.lr": _POSITIVE,
    "trainer.optimizer.beta1": _BELOW_ONE,
    "trainer.optimizer.beta2": _BELOW_ONE,
    "trainer.optimizer.eps": _POSITIVE,
    "trainer.optimizer.weight_decay": _at_least(0),
    "trainer.optimizer.max_grad_norm": _POSITIVE,
    "trainer.schedule.warmup_steps": _at_least(0),
    "trainer.schedule.min_lr_ratio": _SHARE,
    "trainer.checkpoint.every_steps": _at_least(0),
    "trainer.checkpoint.keep": _at_least(1),
    "weight_sync.bucket_mib": _at_least(1),
    "weight_sync.door_timeout_s": _POSITIVE,
    "weight_sync.transfer_timeout_s": _POSITIVE,
    "weight_sync.max_probe_difference": _POSITIVE,
    "cluster.start_timeout_s": _POSITIVE,
    "cluster.heartbeat_timeout_s": _POSITIVE,
    "cluster.stop_grace_s": _POSITIVE,
}


def check(cfg: Config, *, skip: Collection[str] = ()) -> list[Finding]:
    """Every broken rule that involves none of the keys in `skip` (those are known to be wrong)."""
    findings = []
    for key, rule in _RANGES.items():
        if not rule.holds(value := get(cfg, key)):
            findings.append(
                Finding(keys=(key,), text=f"{key}: {value} given; expected {rule.expected}.")
            )
    out_of_range = {finding.keys[0] for finding in findings}
    findings = [finding for finding in findings if finding.keys[0] not in skip]
    for rules in (_run, _replay, _lengths, _algorithm, _unused, _model, _task, _cluster):
        for finding in rules(cfg):
            if not set(finding.keys) & (out_of_range | set(skip)):
                findings.append(finding)
    return findings


def get(cfg: Config, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _run(cfg: Config) -> Iterator[Finding]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", cfg.run.name or "made-at-submission"):
        yield Finding(
            keys=("run.name",),
            text=f"run.name: {cfg.run.name!r} given; expected a directory name of letters, digits, "
            "dots, dashes and underscores. Use run.runs_dir to choose where it is made.",
        )
    parent = Path(cfg.run.runs_dir).absolute()
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        yield Finding(
            keys=("run.runs_dir",),
            text=f"run.runs_dir: {cfg.run.runs_dir} cannot be made, {parent} is no directory you "
            "may write to. Choose another with --run.runs_dir.",
        )


def _replay(cfg: Config) -> Iterator[Finding]:
    n_engines = cfg.generator.n_engines
    if cfg.run.replay_of is None and n_engines < 1:
        yield Finding(
            keys=("generator.n_engines",),
            text=f"generator.n_engines: {n_engines} given; expected at least 1.",
        )
    if cfg.run.replay_of is not None and n_engines != 0:
        yield Finding(
            keys=("run.replay_of", "generator.n_engines"),
            text=f"run.replay_of: {cfg.run.replay_of} given; expected nothing, since "
            "`slurm-grpo replay` sets it, with generator.n_engines = 0. Leave it out.",
        )


def _lengths(cfg: Config) -> Iterator[Finding]:
    engine, sampling = cfg.generator.engine, cfg.generator.sampling
    if sampling.max_new_tokens >= engine.max_model_len:
        yield Finding(
            keys=("generator.sampling.max_new_tokens", "generator.engine.max_model_len"),
            text=f"generator.sampling.max_new_tokens: {sampling.max_new_tokens} leaves no token "
            f"for a prompt; expected less than generator.engine.max_model_len = "
            f"{engine.max_model_len}. Raise that, or lower this.",
        )
    if engine.max_num_batched_tokens < engine.max_model_len:
        yield Finding(
            keys=("generator.engine.max_num_batched_tokens", "generator.engine.max_model_len"),
            text=f"generator.engine.max_num_batched_tokens: {engine.max_num_batched_tokens} could "
            "split a prompt, which the CPU engine cannot do with seeds; expected at least "
            f"generator.engine.max_model_len = {engine.max_model_len}. Raise it.",
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Finding(
            keys=("generator.engine.max_num_batched_tokens", "generator.engine.max_num_seqs"),
            text=f"generator.engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is "
            "less than one token for each of generator.engine.max_num_seqs = "
            f"{engine.max_num_seqs}. Raise it, or lower max_num_seqs.",
        )
    budget = cfg.trainer.tokens_per_microbatch
    if budget < engine.max_model_len:
        yield Finding(
            keys=("trainer.tokens_per_microbatch", "generator.engine.max_model_len"),
            text=f"trainer.tokens_per_microbatch: {budget} cannot hold the longest prompt plus "
            f"completion, generator.engine.max_model_len = {engine.max_model_len} tokens. Raise "
            "it, or lower max_model_len.",
        )
    if "" in sampling.stop:
        yield Finding(
            keys=("generator.sampling.stop",),
            text="generator.sampling.stop: holds an empty text, which would end every completion "
            "at once. Remove it.",
        )


def _algorithm(cfg: Config) -> Iterator[Finding]:
    n_engines, groups = cfg.generator.n_engines, cfg.algorithm.groups_per_step
    if n_engines > groups and cfg.algorithm.max_staleness == 0:
        yield Finding(
            keys=("generator.n_engines", "algorithm.groups_per_step", "algorithm.max_staleness"),
            text=f"generator.n_engines: {n_engines} engines share algorithm.groups_per_step = "
            f"{groups} groups a step, so {n_engines - groups} would idle. Lower it to {groups}, "
            "raise groups_per_step, or allow algorithm.max_staleness.",
        )


def _unused(cfg: Config) -> Iterator[Finding]:
    """Settings that would be read by nobody, or lack their partner: a misunderstanding."""
    schedule, scorer, task = cfg.trainer.schedule, cfg.task.scorer, cfg.task
    if schedule.decay == "constant" and schedule.min_lr_ratio != 0.0:
        yield Finding(
            keys=("trainer.schedule.min_lr_ratio", "trainer.schedule.decay"),
            text=f"trainer.schedule.min_lr_ratio: {schedule.min_lr_ratio} has no effect with "
            "trainer.schedule.decay = constant. Choose linear or cosine, or leave it out.",
        )
    if scorer.regex is not None and scorer.name != "regex":
        yield Finding(
            keys=("task.scorer.regex", "task.scorer.name"),
            text=f"task.scorer.regex: has no effect with task.scorer.name = {scorer.name}. "
            "Set the name to regex, or leave it out.",
        )
    if scorer.module_dir is not None and ":" not in scorer.name:
        yield Finding(
            keys=("task.scorer.module_dir", "task.scorer.name"),
            text=f"task.scorer.module_dir: has no effect with task.scorer.name = {scorer.name}. "
            "Set the name to module:function, or leave it out.",
        )
    keep, keep_steps = cfg.staging.keep, cfg.staging.keep_steps
    if (keep == "recent") != (keep_steps is not None):
        yield Finding(
            keys=("staging.keep_steps", "staging.keep"),
            text=f"staging.keep_steps: {keep_steps} given with staging.keep = {keep}; expected a "
            "number of steps with recent, and nothing otherwise. Set both, or leave it out.",
        )
    for key, value in (("task.path", task.path), ("task.eval_path", task.eval_path)):
        if value is not None and task.name != "jsonl":
            yield Finding(
                keys=(key, "task.name"),
                text=f"{key}: has no effect with task.name = {task.name}. Set the name to jsonl, "
                "or leave it out.",
            )


def _model(cfg: Config) -> Iterator[Finding]:
    if not cfg.model.path:
        yield Finding(
            keys=("model.path",),
            text="model.path: missing; expected a Hugging Face model directory (config.json, "
            "safetensors, tokenizer). Add `model: {path: ...}`, or pass --model.path.",
        )
        return
    problems = model_support.check_model_dir(cfg.model.path)
    for problem in problems:
        yield Finding(keys=("model.path",), text=f"model.path: {problem}")
    if not problems:
        shape = model_support.read_model_shape(cfg.model.path)
        longest = shape.max_position_embeddings
        if cfg.generator.engine.max_model_len > longest:
            yield Finding(
                keys=("generator.engine.max_model_len", "model.path"),
                text=f"generator.engine.max_model_len: {cfg.generator.engine.max_model_len} given; "
                f"this model has {longest} positions (max_position_embeddings). Lower it.",
            )
        width = cfg.generator.engine.tensor_parallel
        if shape.n_heads % width or (shape.n_kv_heads % width and width % shape.n_kv_heads):
            yield Finding(
                keys=("generator.engine.tensor_parallel", "model.path"),
                text=f"generator.engine.tensor_parallel: {width} cannot split this model's "
                f"{shape.n_heads} attention and {shape.n_kv_heads} key/value heads evenly. "
                "Choose a divisor of both.",
            )


def _task(cfg: Config) -> Iterator[Finding]:
    if cfg.run.replay_of is not None:
        return  # its prompts and answers are in the episodes
    for keys, text in task_checks.check_task(cfg):
        yield Finding(keys=keys, text=f"{keys[0]}: {text}")


def _cluster(cfg: Config) -> Iterator[Finding]:
    for keys, text in check_cluster(cfg):
        yield Finding(keys=keys, text=text)
    if cfg.wandb.enabled and not cfg.wandb.project:
        yield Finding(
            keys=("wandb.project",),
            text="wandb.project: empty; expected a project name. Set it, or leave it out.",
        )
