"""The tasks by name."""

from __future__ import annotations

from slurm_grpo.config.schema import TaskConfig
from slurm_grpo.tasks.addition import Addition
from slurm_grpo.tasks.base import PromptSource
from slurm_grpo.tasks.jsonl import JsonlRows
from slurm_grpo.tasks.sum_digits import SumDigits


def build_prompt_source(cfg: TaskConfig, seed: int) -> PromptSource:
    """The source of `cfg.name`. Raises `ConfigError` when a prompt file cannot be used."""
    match cfg.name:
        case "addition":
            return Addition(seed)
        case "sum_digits":
            return SumDigits(seed)
        case "jsonl":
            return JsonlRows(cfg, seed)
