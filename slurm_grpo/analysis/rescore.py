"""`slurm-grpo rescore RUN --scorer S`: score a run's episodes again, without touching them.

The scorer runs in the same child process, under the same time limit, as during training; its
rewards become columns beside the old ones (`rescored.py`). Shard by shard and durable, so that a
call that was interrupted, or a run that went on, is continued by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_grpo.analysis.frame import open_run
from slurm_grpo.analysis.index import RunIndex, ShardEntry, read_index
from slurm_grpo.analysis.rescored import (
    ERROR,
    REWARD,
    Rescoring,
    description_path,
    read_description,
    read_scores,
    write_description,
    write_scores,
)
from slurm_grpo.analysis.terminal import add_run, say
from slurm_grpo.checks.task import scorer_problems
from slurm_grpo.config import loading as config_io
from slurm_grpo.config.schema import ScorerConfig
from slurm_grpo.errors import ConfigError, ExitCode, ShardError
from slurm_grpo.fsio import sweep_temporaries
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.layout import MAX_SAMPLES
from slurm_grpo.staging.shards import read_groups, read_ref
from slurm_grpo.tasks.scorer import Scorer

SAY_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, the scorer with its settings, and the name of its columns."""
    add_run(parser)
    parser.add_argument(
        "--scorer",
        required=True,
        metavar="S",
        help="exact, last_number, regex, or a function of yours as module:function",
    )
    parser.add_argument(
        "--name", help="of its columns: NAME_reward, ...; by default the scorer's or function's"
    )
    parser.add_argument("--regex", metavar="R", help="with --scorer regex: the pattern")
    parser.add_argument(
        "--timeout-s", type=float, default=5.0, metavar="T", help="for one episode (default: 5)"
    )
    parser.add_argument(
        "--max-errors",
        type=int,
        default=64,
        metavar="N",
        help="episodes that may fail to score before the command fails (default: 64)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Score what has no score of this name yet, then say how the means compare."""
    index = read_index(arguments.run)
    cfg = scorer_config(index.run, arguments)
    logging.getLogger(Scorer.__module__).setLevel(logging.ERROR)  # errors are counted and shown
    name = arguments.name or cfg.name.rpartition(":")[2]
    if not re.fullmatch(r"(?!part_|is$)[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(
            f"--name: {name!r} given; expected letters, digits and underscores, since it begins "
            "the names of columns, and not those of the run's own (part_, is)."
        )
    if not index.shards:
        raise ConfigError(f"{arguments.run}: there is no episode to score yet.")
    n_new = rescore(index, cfg, name)
    say(_result(index.run, name, n_new, len(index.shards)))
    return ExitCode.OK


def scorer_config(run: RunDir, arguments: argparse.Namespace) -> ScorerConfig:
    """The scorer asked for. A module is looked for like one in a configuration, then where the
    run's own scorer was. Raises ConfigError."""
    own = config_io.read_frozen(run.config).task.scorer
    wanted = {"name": arguments.scorer, "module_dir": None, "regex": arguments.regex}
    wanted |= {"timeout_s": arguments.timeout_s, "max_errors": arguments.max_errors}
    options = [word for k, v in wanted.items() for word in (f"--task.scorer.{k}", str(v))]
    cfg = config_io.read_config(run.config, options).task.scorer
    if ":" in cfg.name and cfg.module_dir is None:
        cfg = replace(cfg, module_dir=own.module_dir)
    if problems := [f"--scorer: {text}" for _, text in scorer_problems(cfg)]:
        raise ConfigError("\n".join(problems))
    return cfg


def rescore(index: RunIndex, cfg: ScorerConfig, name: str) -> int:
    """Score every readable shard that has no scores under `name`; how many those were.

    Raises ConfigError when `name` belongs to another scorer, ScorerLimitExceeded beyond
    `max_errors`. Shards that were finished before stay finished.
    """
    rescoring = _describe(index.run, name, cfg)
    folder = index.run.rescored / name
    sweep_temporaries(folder)
    waiting = []
    for shard in index.shards:
        try:
            ids = index.read(shard.path, lambda file: file["episodes/episode_id"][()])
            if ids is not None:
                read_scores(folder / shard.name.file_name, shard.name, ids)
        except (FileNotFoundError, ShardError):
            waiting.append(shard)
    scorer, said = Scorer(cfg), time.monotonic()
    try:
        for n_done, shard in enumerate(waiting):
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                say(f"{n_done} of {len(waiting)} shards, {scorer.n_errors} errors")
            rescoring = _score_shard(index, shard, scorer, rescoring)
    finally:
        scorer.close()
    return len(waiting)


def _score_shard(
    index: RunIndex, shard: ShardEntry, scorer: Scorer, rescoring: Rescoring
) -> Rescoring:
    """Score one shard, whose bytes are checked against its CRC; the rescoring, with new parts."""
    try:
        ref = read_ref(index.run, shard.path, deadline_s=0.0)
        groups = read_groups(index.run, ref, shard.group_ids.tolist(), deadline_s=0.0)
    except ShardError as error:
        index.skip(shard.path, str(error))
        return rescoring
    episodes = [episode for group in groups for episode in group]
    results = scorer.score([(e.completion.text, e.prompt.target) for e in episodes])
    parts = {name for result in results for name in result.parts}
    if not parts <= set(rescoring.part_names):
        names = tuple(sorted(parts | set(rescoring.part_names)))
        rescoring = replace(rescoring, part_names=names)
        write_description(index.run, rescoring)
    ids = [e.group_id * MAX_SAMPLES + e.sample_index for e in episodes]
    path = index.run.rescored / rescoring.name / shard.name.file_name
    write_scores(path, shard.name, ids, results)
    return rescoring


def _describe(run: RunDir, name: str, cfg: ScorerConfig) -> Rescoring:
    """The rescoring of this name, begun now if it is new. Raises ConfigError when it is another
    scorer's, or the scorer's code has changed since: its scores would be mixed with these."""
    scorer = {"name": cfg.name, "regex": cfg.regex, "code_sha256": _code_sha256(cfg)}
    path = description_path(run, name)
    if not path.exists():
        rescoring = Rescoring(name=name, scorer=scorer, part_names=())
        write_description(run, rescoring)
        return rescoring
    rescoring = read_description(path)
    if differing := [key for key, value in scorer.items() if rescoring.scorer.get(key) != value]:
        what = "other code" if differing == ["code_sha256"] else f"{rescoring.scorer['name']}"
        raise ConfigError(
            f"--name: {name} holds the scores of {what} ({path}). Choose another --name, or remove "
            f"{path.parent} to score everything again."
        )
    return rescoring


def _code_sha256(cfg: ScorerConfig) -> str | None:
    """Of the file that a scorer of one's own is in; None for a package or an installed one."""
    if ":" not in cfg.name or cfg.module_dir is None:
        return None
    file = Path(cfg.module_dir) / f"{cfg.name.partition(':')[0].replace('.', '/')}.py"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _result(run: RunDir, name: str, n_new: int, n_shards: int) -> str:
    """The closing lines: what there is now, and both means."""
    columns: list[Any] = ["reward", "is_error", name + REWARD, name + ERROR]
    table = open_run(run.root).episodes(columns)
    old = table["reward"][~table["is_error"].astype(bool)]
    n_scored = int(table[name + REWARD].notna().sum())
    failed = table[name + ERROR].dropna()
    example = f", such as {failed.iloc[0]}" if len(failed) else ""
    lines = [
        f"{name}: {n_scored:,} of {len(table):,} episodes scored, {len(failed):,} errors{example}",
        f"{n_new} of {n_shards} shards were scored now; the others had been",
        f"mean reward {table[name + REWARD].mean():.3f}; the run's own {old.mean():.3f}",
        f"in {run.rescored / name}; see them with: slurm-grpo report {run.root} --score {name}",
    ]
    return "\n".join(lines)
