"""`slurm-grpo resume RUN [--run.steps N]`: what `launch/submit.py --resume` does, by a run's
name."""

from __future__ import annotations

import argparse

from slurm_grpo.commands.submit import main
from slurm_grpo.run.state import RUN_HELP, find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="of launch/submit.py, such as --run.steps 80 or --dry-run",
    )


def run(arguments: argparse.Namespace) -> int:
    return main(["--resume", str(find_run(arguments.run).root), *arguments.options])
