"""What must hold between the values of a configuration, and between it and the files it names.

Called by `loading.py`, which knows where each value was written. Every rule's text has three
parts: the key with its value, what was expected, what to do. Imports nothing heavy, so that the
login node can ask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path

from slurm_grpo.checks.cluster import check_cluster
from slurm_grpo.checks.task import check_task
from slurm_grpo.config import model_support
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import option_types
from slurm_grpo.slurm.partitions import Found


def check(cfg: Config, skip: Collection[str] = ()) -> list[tuple[tuple[str, ...], str]]:
    """Every broken rule: the keys involved, the one to change first, and what is wrong with it.

    Leaves out rules that involve a key in `skip` (those are known to be wrong).
    """
    ranges = {
        key: f"{attrgetter(key)(cfg)} given; expected {rule.expected}."
        for key, hint in option_types(Config, include_extras=True).items()
        for rule in getattr(hint, "__metadata__", ())
        if not rule.holds(attrgetter(key)(cfg))
    }
    findings: list[tuple[tuple[str, ...], str]] = [
        ((key,), text) for key, text in ranges.items() if key not in skip
    ]
    for rules in (
        _run,
        _replay,
        _lengths,
        _algorithm,
        _unused,
        _model,
        check_task,
        check_cluster,
        _wandb,
    ):
        findings += [(keys, text) for keys, text in rules(cfg) if not set(keys) & {*ranges, *skip}]
    return findings


def _run(cfg: Config) -> Found:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", cfg.run.name or "made-at-submission"):
        yield (
            ("run.name",),
            f"{cfg.run.name!r} given; expected a directory name of letters, digits, dots, dashes "
            "and underscores. Use run.runs_dir to choose where it is made.",
        )
    parent = Path(cfg.run.runs_dir).absolute()
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        yield (
            ("run.runs_dir",),
            f"{cfg.run.runs_dir} cannot be made, {parent} is no directory you may write to. "
            "Choose another with --run.runs_dir.",
        )


def _replay(cfg: Config) -> Found:
    n_engines = cfg.generator.n_engines
    if cfg.run.replay_of is None and n_engines < 1:
        yield (
            ("generator.n_engines",),
            f"{n_engines} given; expected at least 1.",
        )
    if cfg.run.replay_of is not None and n_engines != 0:
        yield (
            ("run.replay_of", "generator.n_engines"),
            f"{cfg.run.replay_of} given; expected nothing, since `slurm-grpo replay` sets it, "
            "with generator.n_engines = 0. Leave it out.",
        )


def _lengths(cfg: Config) -> Found:
    engine, sampling = cfg.generator.engine, cfg.generator.sampling
    if sampling.max_new_tokens >= engine.max_model_len:
        yield (
            ("generator.sampling.max_new_tokens", "generator.engine.max_model_len"),
            f"{sampling.max_new_tokens} leaves no token for a prompt; expected less than "
            f"generator.engine.max_model_len = {engine.max_model_len}. Raise that, or lower this.",
        )
    if engine.max_num_batched_tokens < engine.max_model_len:
        yield (
            ("generator.engine.max_num_batched_tokens", "generator.engine.max_model_len"),
            f"{engine.max_num_batched_tokens} could split a prompt, which the CPU engine cannot "
            "do with seeds; expected at least generator.engine.max_model_len = "
            f"{engine.max_model_len}. Raise it.",
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield (
            ("generator.engine.max_num_batched_tokens", "generator.engine.max_num_seqs"),
            f"{engine.max_num_batched_tokens} is less than one token for each of "
            f"generator.engine.max_num_seqs = {engine.max_num_seqs}. Raise it, or lower "
            "max_num_seqs.",
        )
    budget = cfg.trainer.tokens_per_microbatch
    if budget < engine.max_model_len:
        yield (
            ("trainer.tokens_per_microbatch", "generator.engine.max_model_len"),
            f"{budget} cannot hold the longest prompt plus completion, "
            f"generator.engine.max_model_len = {engine.max_model_len} tokens. Raise it, or lower "
            "max_model_len.",
        )
    if "" in sampling.stop:
        yield (
            ("generator.sampling.stop",),
            "holds an empty text, which would end every completion at once. Remove it.",
        )


def _algorithm(cfg: Config) -> Found:
    n_engines, groups = cfg.generator.n_engines, cfg.algorithm.groups_per_step
    if n_engines > groups and cfg.algorithm.max_staleness == 0:
        yield (
            ("generator.n_engines", "algorithm.groups_per_step", "algorithm.max_staleness"),
            f"{n_engines} engines share algorithm.groups_per_step = "
            f"{groups} groups a step, so {n_engines - groups} would idle. Lower it to {groups}, "
            "raise groups_per_step, or allow algorithm.max_staleness.",
        )


def _unused(cfg: Config) -> Found:
    """Settings that would be read by nobody, or lack their partner: a misunderstanding."""
    schedule, scorer, task = cfg.trainer.schedule, cfg.task.scorer, cfg.task
    if schedule.decay == "constant" and schedule.min_lr_ratio != 0.0:
        yield (
            ("trainer.schedule.min_lr_ratio", "trainer.schedule.decay"),
            f"{schedule.min_lr_ratio} has no effect with trainer.schedule.decay = constant. "
            "Choose linear or cosine, or leave it out.",
        )
    for key, partner, wanted, is_wanted in (
        ("task.scorer.regex", "task.scorer.name", "regex", scorer.name == "regex"),
        ("task.scorer.module_dir", "task.scorer.name", "module:function", ":" in scorer.name),
        ("task.path", "task.name", "jsonl", task.name == "jsonl"),
        ("task.eval_path", "task.name", "jsonl", task.name == "jsonl"),
    ):
        if attrgetter(key)(cfg) is not None and not is_wanted:
            yield (
                (key, partner),
                f"has no effect with {partner} = {attrgetter(partner)(cfg)}. Set the name to "
                f"{wanted}, or leave it out.",
            )
    keep, keep_steps = cfg.staging.keep, cfg.staging.keep_steps
    if (keep == "recent") != (keep_steps is not None):
        yield (
            ("staging.keep_steps", "staging.keep"),
            f"{keep_steps} given with staging.keep = {keep}; expected a number of steps with "
            "recent, and nothing otherwise. Set both, or leave it out.",
        )


def _model(cfg: Config) -> Found:
    if not cfg.model.path:
        yield (
            ("model.path",),
            "missing; expected a Hugging Face model directory (config.json, "
            "safetensors, tokenizer). Add `model: {path: ...}`, or pass --model.path.",
        )
        return
    problems = model_support.check_model_dir(cfg.model.path)
    for problem in problems:
        yield (("model.path",), problem)
    if not problems:
        shape = model_support.read_model_shape(cfg.model.path)
        longest = shape.max_position_embeddings
        if cfg.generator.engine.max_model_len > longest:
            yield (
                ("generator.engine.max_model_len", "model.path"),
                f"{cfg.generator.engine.max_model_len} given; this model has {longest} positions "
                "(max_position_embeddings). Lower it.",
            )
        width = cfg.generator.engine.tensor_parallel
        if shape.n_heads % width or (shape.n_kv_heads % width and width % shape.n_kv_heads):
            yield (
                ("generator.engine.tensor_parallel", "model.path"),
                f"{width} cannot split this model's {shape.n_heads} attention and "
                f"{shape.n_kv_heads} key/value heads evenly. Choose a divisor of both.",
            )


def _wandb(cfg: Config) -> Found:
    if cfg.wandb.enabled and not cfg.wandb.project:
        yield (
            ("wandb.project",),
            "empty; expected a project name. Set it, or leave it out.",
        )
