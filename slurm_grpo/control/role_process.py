"""What every role process does around its loop: read its environment, run, and end with the right
exit code.

The supervisor sets the environment and reads the exit code; nothing else passes between them
outside the control plane. Knows no torch and no vLLM.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.control.client import ControlClient
from slurm_grpo.errors import ExitCode, SlurmGrpoError, Stopped
from slurm_grpo.run.directory import AttemptDir, RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleContext:
    """Who this process is, and what it works with."""

    run: RunDir
    attempt: int
    peer: str
    """`engine-<k>` or `trainer-<rank>`."""
    incarnation: int
    config: Config
    client: ControlClient

    @property
    def attempt_dir(self) -> AttemptDir:
        return self.run.attempt(self.attempt)

    @property
    def index(self) -> int:
        """The number in `peer`."""
        return int(self.peer.rsplit("-", 1)[1])


def run_role(loop: Callable[[RoleContext], None]) -> None:
    """Run a role's loop and leave the process, never returning.

    Leaves by `os._exit`: a collective that can never finish may keep a thread busy, and must not
    keep the process.
    """
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    code = _run(loop)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(loop: Callable[[RoleContext], None]) -> int:
    run = RunDir(Path(os.environ["SLURM_GRPO_RUN_DIR"]))
    attempt, incarnation = (int(os.environ[f"SLURM_GRPO_{n}"]) for n in ("ATTEMPT", "INCARNATION"))
    peer = os.environ["SLURM_GRPO_PEER"]
    try:
        connection = ControlClient(attempt=run.attempt(attempt), peer=peer, incarnation=incarnation)
        with closing(connection) as client:
            context = RoleContext(
                run=run,
                attempt=attempt,
                peer=peer,
                incarnation=incarnation,
                config=read_frozen(run.config),
                client=client,
            )
            loop(context)
            client.flush(timeout_s=5.0)
        return ExitCode.OK
    except Stopped as stopped:
        log.info("%s: leaving: %s", peer, stopped)
        return ExitCode.OK
    except SlurmGrpoError as error:
        traceback.print_exc()
        return error.exit_code
    except Exception:  # noqa: BLE001 - the process entry point
        traceback.print_exc()
        return ExitCode.FAILURE
