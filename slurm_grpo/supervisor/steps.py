"""Starting and ending role processes behind one small interface, so that the supervisor never asks
where it runs.

The supervisor is the caller: it hands over `StepSpec`s and gets a `Step` for each to poll,
terminate and kill. This file has the local implementation, `jobs/srun_steps.py` Slurm's. Both
promise that a role's output goes to a file, never a pipe; that its exit code is written next to its
log; and that neither a killed supervisor nor a killed step leaves a process behind. They know
nothing about what the processes do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_grpo.config.schema import Config
from slurm_grpo.run import proctree
from slurm_grpo.run.directory import AttemptDir, RunDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.supervisor.environment import role_environment

log = logging.getLogger(__name__)

# Runs between fork and the role, in a fresh interpreter (a `preexec_fn` may deadlock once the
# supervisor has threads). PR_SET_PDEATHSIG (1) survives exec; the parent may have died before it
# was set, hence the look at getppid.
_BIND_TO_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): os._exit(137)\n"
    "try: os.execvp(sys.argv[2],sys.argv[2:])\n"
    "except OSError as e: sys.exit(f'cannot start {sys.argv[2]}: {e.strerror}')\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """One process to start."""

    peer: str
    """`engine-<k>` or `trainer-<rank>`."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment, not additions to the supervisor's."""
    log: Path
    """stdout and stderr, appended."""
    exit_file: Path
    """Receives the exit code as a decimal number; minus the signal number if a signal ended the
    process."""


def role_spec(
    run: RunDir, cfg: Config, *, attempt: int, peer: str, incarnation: int, module: str
) -> StepSpec:
    """The process `peer` of an attempt, which runs `module`."""
    folder = run.attempt(attempt)
    return StepSpec(
        peer=peer,
        argv=(cfg.cluster.python or sys.executable, "-m", module),
        env=role_environment(
            os.environ, cfg, run, attempt=attempt, peer=peer, incarnation=incarnation
        ),
        log=folder.log(peer),
        exit_file=folder.exit_code(peer),
    )


class Step(Protocol):
    """A started process."""

    @property
    def spec(self) -> StepSpec: ...

    @property
    def pid(self) -> int:
        """Of the process on this host: the role, or the srun in front of it."""

    @property
    def where(self) -> str:
        """` on NODE`, or nothing on this host."""

    @property
    def log(self) -> Path:
        """What explains its end: the role's log, or the launcher's if the role never began one."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs. The first call that sees the end also removes what the
        step left behind."""

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM); harmless when it has."""

    def kill(self) -> None:
        """End the process and everything it started (SIGKILL); harmless when they have."""


class StepLauncher(ABC):
    """Starts steps, and knows what surrounds them; one subclass a placement. The defaults are those
    of a host that nothing surrounds."""

    poll_s: float
    """How often the supervisor looks at its steps when nothing wakes it."""
    on_this_host: bool
    """Whether the processes are this host's, to be measured here, and run its packages."""
    control_host: str
    """Address of this host that every step can reach."""

    @property
    def facts(self) -> dict[str, Any]:
        """What an attempt's record should say about the surroundings."""
        return {}

    def prepare(self, attempt: AttemptDir) -> None:  # noqa: B027 - nothing to do is a default
        """End what an earlier life of the job left; called once, before the first start. Raises
        DeadlineExceeded."""

    @abstractmethod
    def start(self, specs: Sequence[StepSpec]) -> dict[str, Step]:
        """Start processes, together where that is possible, and return at once, by peer name.
        Raises OSError when a log cannot be opened."""

    def told_to_end(self) -> bool:
        """Whether somebody else has asked a step to end since this was last asked."""
        return False

    def why_told(self) -> tuple[Ending, str]:
        """Why the supervisor or its steps were told to end, or did: BOUNDARY when there is time for
        a checkpoint, SIGNALLED when the surroundings know of no reason; and a sentence."""
        return Ending.SIGNALLED, ""

    def close(self) -> None:  # noqa: B027 - nothing to do is a default
        """See the end of what the steps needed; none is running any more."""


class LocalStep:
    """A child process in a session of its own."""

    def __init__(self, spec: StepSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self._process = process
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def where(self) -> str:
        return ""

    @property
    def log(self) -> Path:
        return self.spec.log

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        # Before the leader is reaped: until then its pid, and so the session id, cannot belong to
        # anybody else.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._kill_session()
        self._code = self._process.wait()
        try:
            temporary = self.spec.exit_file.with_suffix(".exit.tmp")
            temporary.write_text(f"{self._code}\n")
            temporary.replace(self.spec.exit_file)
        except OSError:  # the code is known all the same
            log.exception("%s: exit code %d not written", self.spec.exit_file, self._code)
        return self._code

    def terminate(self) -> None:
        if self._code is None:
            # Not Popen.send_signal, which reaps a process that has ended before `poll` sees it.
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._code is None:
            self._kill_session()

    def _kill_session(self) -> None:
        # Descendants include those that made a session of their own (wandb-core); session members
        # those whose parent died.
        for pid in proctree.descendants(self.pid) | proctree.session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class LocalLauncher(StepLauncher):
    """Steps as child processes of the supervisor."""

    poll_s = 0.25
    on_this_host = True
    control_host = "127.0.0.1"

    def start(self, specs: Sequence[StepSpec]) -> dict[str, Step]:
        return {spec.peer: start_local(spec) for spec in specs}


def start_local(spec: StepSpec, stdin: int = subprocess.DEVNULL) -> LocalStep:
    """A child process that does not outlive this one. Raises OSError when its log cannot be
    opened."""
    # The kernel sends the parent-death signal when the forking *thread* ends, not the process.
    assert threading.current_thread() is threading.main_thread()
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", "-c", _BIND_TO_PARENT, str(os.getpid()), *spec.argv]
    with spec.log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=dict(spec.env),
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return LocalStep(spec, process)
