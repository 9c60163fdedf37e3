"""`slurm-grpo episodes schema`: what a shard and the tables made of it hold, as documentation."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping

import numpy as np

from slurm_grpo.analysis.columns import EPISODE_COLUMNS, GROUP_COLUMNS, PART
from slurm_grpo.analysis.terminal import say
from slurm_grpo.errors import ExitCode
from slurm_grpo.staging import layout

WIDTH = 80
INTRODUCTION = """\
An immutable HDF5 file of whole groups: P groups (prompts), N episodes, Tp prompt tokens, T
completion tokens. What belongs together lies together, and offsets cut it: the tokens of episode n
are tokens/*[o[n]:o[n+1]], where o is episodes/token_offsets. Texts are JSON strings in UTF-8. Token
arrays carry checksums. Each dataset has the attributes `description` and `units`. The file's name
is v(newest policy version)-e(engine)-a(attempt)-i(life of the engine)-s(sequence)-(CRC-32)-(bytes).
"""
ATTRIBUTES = {
    "schema": "What kind of file this is",
    "schema_version": "Major and minor; a reader refuses a major it does not know",
    "complete": "1, written last: the writer finished the file",
    "run_id": "Run that made it",
    "shard_uuid": "Unique to this file",
    "engine_id": "Engine that generated it",
    "incarnation": "Lives of this engine in this attempt before, from 0",
    "attempt": "Life of the supervisor, from 0",
    "sequence": "Shards this incarnation published before",
    "created_unix_ns": "Time it was built, Unix nanoseconds",
    "model_id": "Model the run started from",
    "tokenizer_sha256": "Of the tokenizer's files",
    "vocab_size": "Token ids are below it",
    "logprobs_mode": "Of the engine: which distribution log-probabilities are of",
    "sampling_params_json": "How completions were sampled",
    "code_version": "Of this package",
    "n_groups": "P",
    "n_episodes": "N",
    "n_tokens": "T",
}
"""Attributes of a shard's root."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(arguments: argparse.Namespace) -> int:
    say(schema_text())
    return ExitCode.OK


def schema_text() -> str:
    """The whole documentation, 80 columns wide."""
    columns = {column.path: column for column in layout.COLUMNS}
    parts = {f"{PART}<name>": "Reward part, unweighted; NaN: not applicable"}
    episodes = {name: column.description for name, column in EPISODE_COLUMNS.items()} | parts
    groups = {name: column.description for name, column in GROUP_COLUMNS.items()}
    version = ".".join(map(str, layout.SCHEMA_VERSION))
    lines = [
        f"Shards: {layout.SCHEMA}, version {version}",
        "",
        *textwrap.wrap(INTRODUCTION, WIDTH),
        "",
        "Attributes of the file",
        *_entries(ATTRIBUTES),
        "",
        "Datasets: type[axis], unit",
    ]
    for path, column in columns.items():
        axis = f"{column.axis},K" if path == "episodes/reward_parts" else column.axis
        lines += [f"  {path}  {_type(path)}[{axis}], {column.units}", f"      {column.description}"]
    lines += [
        "",
        "Tables: slurm_grpo.analysis.open_run(RUN), columns of episodes()",
        *_entries(episodes),
        "",
        "Columns of groups()",
        *_entries(groups),
    ]
    return "\n".join(lines)


def _entries(described: Mapping[str, str]) -> Iterator[str]:
    wide = max(map(len, described))
    for name, description in described.items():
        first = f"  {name.ljust(wide)}  "
        yield from textwrap.wrap(
            description, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)
        )


def _type(path: str) -> str:
    if path == "episodes/finish_reason":
        return "/".join(layout.FINISH_REASONS)
    dtype = layout.BY_PATH[path].dtype
    return "utf-8" if dtype is layout.TEXT else np.dtype(dtype).name
