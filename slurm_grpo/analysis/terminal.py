"""What the commands on episodes share: the run they are given, tables that fit a terminal, and the
last word about files that could not be read. Imports no pandas."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_grpo.run.state import RUN_HELP, run_path

if TYPE_CHECKING:
    from slurm_grpo.analysis.frame import RunData


def add_run(parser: argparse.ArgumentParser) -> None:
    """The run directory, the first argument of every command."""
    parser.add_argument("run", type=run_path, metavar="RUN", help=RUN_HELP)


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def say(text: str) -> None:
    """Print to stdout, whatever the model wrote: what is no printable text is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without anything that could steer a terminal; line ends and tabs stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], max_width: int) -> str:
    """Right-aligned columns under `header`; those that do not fit follow below, each block led by
    the first column again."""
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    blocks, used = [[0]], widths[0]
    for i in range(1, len(header)):
        if len(blocks[-1]) > 1 and used + 2 + widths[i] > max_width:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(i)
        used += 2 + widths[i]
    return "\n\n".join(
        "\n".join(
            "  ".join(line[i].rjust(widths[i]) for i in block).rstrip() for line in (header, *rows)
        )
        for block in blocks
    )


def warn_of_damage(run: RunData) -> None:
    """Say on stderr how much of the run was left out; each file has been named in the log."""
    if run.damaged:
        sys.stderr.write(
            f"warning: {len(run.damaged)} file(s) of {run.run.root} could not be read and are left "
            "out above; `slurm-grpo episodes verify` checks all of them.\n"
        )
