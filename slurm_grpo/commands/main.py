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

from slurm_grpo.commands.command_line import exit_code_of
from slurm_grpo.errors import ExitCode

COMMANDS = {
    "status": ("commands.status", "state, step, reward and throughput of a run"),
    "logs": ("commands.logs", "print or follow a run's logs"),
    "cancel": ("commands.cancel", "end a run for good"),
    "resume": ("commands.resume", "continue a run from its last checkpoint"),
    "doctor": ("commands.doctor", "check what a run needs from a cluster"),
    "sweep status": ("commands.sweep_status", "state of every run of a sweep"),
    "sweep table": ("commands.sweep_table", "final metrics of a sweep, sorted"),
    "report": ("analysis.report", "one HTML page about a run"),
    "rescore": ("analysis.rescore", "score staged episodes again"),
    "replay": ("commands.replay", "train on staged episodes without engines"),
    "episodes summary": ("analysis.summary_table", "episodes by version and task"),
    "episodes show": ("analysis.show", "read episodes, coloured by log-probability"),
    "episodes diff": ("analysis.diff", "where two runs differ"),
    "episodes export": ("analysis.export", "episodes as Parquet, CSV or JSON lines"),
    "episodes schema": ("analysis.schema", "the file format, as documentation"),
    "episodes verify": ("staging.verify", "check every shard and manifest"),
    "episodes compact": ("staging.compact", "merge small shards into large ones"),
}
"""By the words that call them, the module in this package, and a line for the list."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's) names; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    name = next((n for n in (" ".join(words[:2]), " ".join(words[:1])) if n in COMMANDS), None)
    if name is None:
        return _list(words)
    module_name, what = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"slurm-grpo {name}", description=what)
    try:
        module = importlib.import_module(f"slurm_grpo.{module_name}")
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
        *(f"  {n:<{width}}  {what}" for n, (_, what) in shown.items()),
    ]
    is_asked = words in ([], [family]) or words[-1] in ("-h", "--help")
    if not is_asked:
        lines.insert(0, f"slurm-grpo: no command {' '.join(words[:2])!r}")
    (sys.stdout if is_asked else sys.stderr).write("\n".join(lines) + "\n")
    return ExitCode.OK if is_asked else ExitCode.CONFIG
