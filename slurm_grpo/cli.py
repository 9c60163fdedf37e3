"""The `slurm-grpo` command: one table of sub-commands, each in a module of its own.

A module is imported when its command is called, so that asking for a run's state imports no pandas
and nothing here imports torch. Each has `add_arguments(parser)` and `run(arguments)`, which returns
the exit code; one that sets a default for `overrides` gets what its parser does not know there.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_grpo.command_line import exit_code_of
from slurm_grpo.errors import ExitCode


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives, and its line in the list."""

    module: str
    help: str


COMMANDS = {
    "status": Command("slurm_grpo.commands.status", "state, step, reward and throughput of a run"),
    "logs": Command("slurm_grpo.commands.logs", "print or follow a run's logs"),
    "cancel": Command("slurm_grpo.commands.cancel", "end a run for good"),
    "resume": Command("slurm_grpo.commands.resume", "continue a run from its last checkpoint"),
    "doctor": Command("slurm_grpo.commands.doctor", "check what a run needs from a cluster"),
    "sweep status": Command("slurm_grpo.commands.sweep_status", "state of every run of a sweep"),
    "sweep table": Command("slurm_grpo.commands.sweep_table", "final metrics of a sweep, sorted"),
    "report": Command("slurm_grpo.analysis.report", "one HTML page about a run"),
    "rescore": Command("slurm_grpo.analysis.rescore", "score staged episodes again"),
    "replay": Command("slurm_grpo.analysis.replay", "train on staged episodes without engines"),
    "episodes summary": Command(
        "slurm_grpo.analysis.summary_table", "episodes by version and task"
    ),
    "episodes show": Command(
        "slurm_grpo.analysis.show", "read episodes, coloured by log-probability"
    ),
    "episodes diff": Command("slurm_grpo.analysis.diff", "where two runs differ"),
    "episodes export": Command(
        "slurm_grpo.analysis.export", "episodes as Parquet, CSV or JSON lines"
    ),
    "episodes schema": Command("slurm_grpo.analysis.schema", "the file format, as documentation"),
    "episodes verify": Command("slurm_grpo.staging.verify", "check every shard and manifest"),
    "episodes compact": Command("slurm_grpo.staging.compact", "merge small shards into large ones"),
}
"""By the words that call them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's) names; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    name = next((n for n in (" ".join(words[:2]), " ".join(words[:1])) if n in COMMANDS), None)
    if name is None:
        return _list(words)
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"slurm-grpo {name}", description=command.help)
    try:
        module = importlib.import_module(command.module)
        module.add_arguments(parser)
        arguments, options = parser.parse_known_args(words[len(name.split()) :])
        if "overrides" in arguments:
            arguments.overrides = options
        elif options:
            parser.error(f"unrecognized arguments: {' '.join(options)}")
        return int(module.run(arguments))
    except ModuleNotFoundError as error:
        if error.name in ("h5py", "pandas", "pyarrow", "matplotlib"):
            sys.stderr.write(
                f"error: {error.name} is missing: pip install 'slurm_grpo[analysis]'\n"
            )
            return ExitCode.CONFIG
        raise


def _list(words: Sequence[str]) -> int:
    """All commands, or those of a family such as `episodes`; an error unless asked for."""
    family = words[0] if words and any(n.startswith(f"{words[0]} ") for n in COMMANDS) else ""
    shown = {n: c for n, c in COMMANDS.items() if n.startswith(family)}
    width = max(map(len, shown))
    lines = [
        f"usage: slurm-grpo {family or 'COMMAND'} ...   (each command has its own --help)",
        "",
        *(f"  {n:<{width}}  {c.help}" for n, c in shown.items()),
    ]
    is_asked = words in ([], [family]) or words[-1] in ("-h", "--help")
    if not is_asked:
        lines.insert(0, f"slurm-grpo: no command {' '.join(words[:2])!r}")
    (sys.stdout if is_asked else sys.stderr).write("\n".join(lines) + "\n")
    return ExitCode.OK if is_asked else ExitCode.CONFIG
