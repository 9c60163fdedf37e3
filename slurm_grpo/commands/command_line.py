"""How every command ends: with an exit code, and an error as one line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from slurm_grpo.errors import SlurmGrpoError


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command. An error of ours goes to stderr; an interruption, or a reader of its output
    that went away, as in `| head`, ends it quietly.

    SIGPIPE keeps Python's handling: a command that supervises a run must survive a closed socket.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SlurmGrpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
