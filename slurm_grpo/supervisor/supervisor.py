"""The supervisor: one process per attempt that starts the roles, watches them, restarts engines and
ends everything.

It waits in one place, for a signal (a child's end is one) or `poll_s` of its launcher. Roles talk
to the scheduler through the control plane, which it hosts; it looks there for a finish, or peers
that went silent. It imports neither torch nor vLLM, and never touches episodes or weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from slurm_grpo.config.schema import Config
from slurm_grpo.control.scheduler import Scheduler
from slurm_grpo.control.server import ControlServer
from slurm_grpo.errors import ConfigError, ExitCode, LockLost, SlurmGrpoError
from slurm_grpo.fsio import write_durably
from slurm_grpo.peers import LEADER, engine_name, parse_peer, trainer_name
from slurm_grpo.run import proctree
from slurm_grpo.run.attempt import AttemptRecord, RunLock, take_attempt
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.outcome import FATAL_CODES, Ending, Outcome, describe, failure, first_to_blame
from slurm_grpo.run.plots import plot_reward
from slurm_grpo.run.summary import write_summary
from slurm_grpo.run.versions import role_versions
from slurm_grpo.supervisor.display import Display, make_display, show_end
from slurm_grpo.supervisor.signals import BoundaryWatch, SignalInbox
from slurm_grpo.supervisor.steps import LocalLauncher, Step, StepLauncher, StepSpec, role_spec

log = logging.getLogger(__name__)

FINISH_S = 60.0
"""Seconds the roles have to leave by themselves once the run is finished."""
MAX_END_S = 6.0
"""Whatever `cluster.stop_grace_s` says, everything is killed this long after a stop."""
LAST_MOMENT_S = 1.0
"""Seconds the roles have at the time limit: Slurm kills the supervisor soon, and it has to requeue
the job before."""
_PSS_EVERY_S = 3.0
_ROLE_MODULES = {"engine": "slurm_grpo.generator.role", "trainer": "slurm_grpo.trainer.role"}
_REPLAY_MODULES = {"trainer": "slurm_grpo.trainer.replay"}


def supervise(
    run: RunDir,
    cfg: Config,
    launcher: StepLauncher | None = None,
    *,
    console: Console | None = None,
    role_modules: dict[str, str] | None = None,
) -> Outcome:
    """Run the next attempt of `run` with steps from `launcher`, by default on this machine, and say
    how it ended.

    Call from the main thread. Raises ConfigError when another live supervisor has the run
    directory. `role_modules` replaces the modules behind `engine` and `trainer`.
    """
    launcher = launcher or LocalLauncher()
    run.create()
    lock = RunLock(run, launcher.facts.get("job_id"))
    lock.acquire()
    try:
        modules = role_modules or role_modules_of(cfg)
        return Supervisor(run, cfg, lock, console or Console(), launcher, modules).run_attempt()
    finally:
        lock.release()


def role_modules_of(cfg: Config) -> dict[str, str]:
    """The module behind each role: a replay's trainer follows another run's steps."""
    return _ROLE_MODULES if cfg.run.replay_of is None else _REPLAY_MODULES


class Supervisor:
    """State of one attempt; `run_attempt` is the table of contents."""

    def __init__(
        self,
        run: RunDir,
        cfg: Config,
        lock: RunLock,
        console: Console,
        launcher: StepLauncher,
        role_modules: dict[str, str],
    ) -> None:
        self._run = run
        self._cfg = cfg
        self._lock = lock
        self._console = console
        self._launcher = launcher
        self._role_modules = role_modules
        self._python = cfg.cluster.python or sys.executable
        self._number = take_attempt(run)
        self._attempt = run.attempt(self._number)
        self._record = AttemptRecord(self._attempt, **launcher.facts)
        self._scheduler = Scheduler(cfg)
        self._steps: dict[str, Step] = {}
        """Running processes by peer name."""
        self._started: dict[str, Step] = {}
        """The latest process of each peer, running or not."""
        self._incarnations: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._overdue: dict[str, str] = {}
        """Why a peer was killed, until its end is seen."""
        self._boundary = BoundaryWatch(cfg)
        self._peak_pss_bytes = 0
        self._next_pss = 0.0
        self._signals = SignalInbox(self._kill_all)
        self._server: ControlServer
        self._display: Display

    def run_attempt(self) -> Outcome:
        handler = self._open_log()
        try:
            with self._signals:
                outcome = self._outcome()
                self._record.note(ending=outcome.ending.value, exit_code=outcome.exit_code)
                self._record.renew(peak_pss_bytes=self._peak_pss_bytes, status=outcome.status)
                if outcome.ending is not Ending.REPLACED:
                    self._report(outcome)
                return outcome
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()

    def _outcome(self) -> Outcome:
        """How the attempt ended, be it by an error of the supervisor's own."""
        try:
            outcome = self._supervise()
            self._lock.check()
            return outcome
        except LockLost as error:
            log.warning("%s", error)
            return Outcome(ending=Ending.REPLACED, exit_code=error.exit_code, error=str(error))
        except SlurmGrpoError as error:
            return Outcome(ending=Ending.FAILED, exit_code=error.exit_code, error=str(error))
        except Exception as error:
            log.exception("the supervisor failed")
            text = f"the supervisor failed: {error!r}"
            return failure(text, ExitCode.FAILURE, self._attempt.log("supervisor"))

    def _supervise(self) -> Outcome:
        """Start, watch and end the roles. No process is left when it returns or raises."""
        self._launcher.prepare(self._attempt)
        self._server = ControlServer(self._scheduler, self._attempt, self._launcher.control_host)
        self._display = make_display(self._run, self._cfg, self._console)
        reason, grace_s = "the supervisor failed", min(self._cfg.cluster.stop_grace_s, MAX_END_S)
        try:
            if self._launcher.on_this_host:  # else a role's host records its own
                self._record_versions()
            self._start_all()
            outcome = self._watch()
            reason = outcome.error or "the run is finished"
            if outcome.ending is Ending.TIME_LIMIT:
                grace_s = LAST_MOMENT_S
            return outcome
        finally:
            self._end_all(reason, grace_s)
            self._launcher.close()
            self._server.close()
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._display.close()

    def _record_versions(self) -> None:
        try:
            versions = role_versions(self._python)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"cluster.python: {self._python} cannot run slurm_grpo ({error}). "
                "Name the interpreter of an environment with the package's dependencies."
            ) from error
        write_durably(self._attempt.versions, json.dumps(versions, indent=2).encode())

    # Starting

    def _start_all(self) -> None:
        self._start([trainer_name(rank) for rank in range(self._cfg.trainer.n_ranks)])
        for engine in range(self._cfg.generator.n_engines):
            self._start([engine_name(engine)])

    def _start(self, peers: Sequence[str]) -> None:
        steps = self._launcher.start([self._prepare(peer) for peer in peers])
        self._steps |= steps
        self._started |= steps
        for peer, step in steps.items():
            n = self._incarnations[peer]
            log.info("started %s%s, incarnation %d, pid %d", peer, step.where, n, step.pid)

    def _prepare(self, peer: str) -> StepSpec:
        role, _ = parse_peer(peer)
        incarnation = self._incarnations.get(peer, -1) + 1
        self._incarnations[peer] = incarnation
        with self._server.locked() as scheduler:
            scheduler.starting(peer, incarnation, time.monotonic())
        return role_spec(
            self._run,
            self._cfg,
            attempt=self._number,
            peer=peer,
            incarnation=incarnation,
            module=self._role_modules[role],
        )

    # Watching

    def _watch(self) -> Outcome:
        """Until the run is over, one way or another."""
        while True:
            self._signals.wait(self._launcher.poll_s)
            now = time.monotonic()
            outcome = self._on_signals() or self._on_exits(now) or self._on_scheduler(now)
            if outcome is not None:
                return outcome
            for peer in [p for p, due in self._restart_at.items() if due <= now]:
                del self._restart_at[peer]
                self._start([peer])
            self._measure(now)
            self._update_display(now)

    def _on_signals(self) -> Outcome | None:
        number = self._signals.stop_signal
        if number is not None or self._launcher.told_to_end():
            ending, why = self._launcher.why_told()
            if ending is Ending.SIGNALLED and number is None:
                self._note(f"the steps got SIGTERM, and go on: {why}")
                return None
            if ending is not Ending.BOUNDARY:
                number = number or signal.SIGTERM
                error = f"received {signal.Signals(number).name}"
                error = f"{error}: {why}" if why else error
                return Outcome(ending=ending, exit_code=128 + number, error=error)
            self._note(why)
            self._signals.stop_signal = None
            self._signals.boundary_stop = True
        if self._signals.boundary_stop:
            self._signals.boundary_stop = False
            self._note("asked to stop: saving a checkpoint at the next step boundary")
            with self._server.locked() as scheduler:
                scheduler.request_boundary_stop()
        return None

    def _on_exits(self, now: float) -> Outcome | None:
        codes = self._reap()
        if not codes:
            return None
        with self._server.locked() as scheduler:
            finished = scheduler.finished
            for peer in codes:
                scheduler.exited(peer, now)
        if finished is not None:
            return None
        ending, why = self._launcher.why_told()
        if ending not in (Ending.SIGNALLED, Ending.BOUNDARY):
            return Outcome(ending=ending, exit_code=ExitCode.STOPPED, error=why)
        trainers = {peer: code for peer, code in codes.items() if peer.startswith("trainer-")}
        if trainers:
            peer = next((p for p in trainers if p in self._overdue), first_to_blame(trainers))
            more = " before the run was finished" if trainers[peer] == ExitCode.OK else ""
            return self._failed(peer, trainers[peer], more)
        for peer, code in codes.items():
            if outcome := self._on_engine_exit(peer, code, now):
                return outcome
        return None

    def _on_engine_exit(self, peer: str, code: int, now: float) -> Outcome | None:
        n_restarts = self._incarnations[peer]
        if code in FATAL_CODES:
            return self._failed(peer, code)
        if n_restarts >= self._cfg.generator.max_restarts:
            return self._failed(
                peer, code, f" after {n_restarts} restarts (generator.max_restarts)"
            )
        self._overdue.pop(peer, None)
        pause_s = self._cfg.generator.restart_backoff_s * 2**n_restarts
        self._restart_at[peer] = now + pause_s
        self._note(
            f"{peer} ended ({describe(code)}); restart {n_restarts + 1} of "
            f"{self._cfg.generator.max_restarts} in {pause_s:.0f} s; log: {self._started[peer].log}"
        )
        return None

    def _on_scheduler(self, now: float) -> Outcome | None:
        with self._server.locked() as scheduler:
            scheduler.tick(now)
            finished = scheduler.finished
            overdue = {} if finished else scheduler.overdue_peers(now)
        for peer, reason in overdue.items():
            if peer in self._steps and peer not in self._overdue:
                step = self._steps[peer]
                if step.where:
                    reason = f"{reason} It was started{step.where}: {step.log}"
                self._overdue[peer] = reason
                self._note(f"killing {reason}")
                step.kill()
        return None if finished is None else self._finish(finished)

    def _finish(self, status: str) -> Outcome:
        """The trainer is through: the roles leave by themselves, and only so long are they waited
        for."""
        deadline = time.monotonic() + FINISH_S
        while self._steps and time.monotonic() < deadline and self._signals.stop_signal is None:
            self._signals.wait(self._launcher.poll_s)
            for peer, code in self._reap().items():
                if code != ExitCode.OK:
                    log.warning("%s ended after the run was finished: %s", peer, describe(code))
        if status == "stopped":
            return Outcome(ending=Ending.BOUNDARY, exit_code=ExitCode.STOPPED)
        return Outcome(ending=Ending.FINISHED, exit_code=ExitCode.OK)

    def _failed(self, peer: str, code: int, more: str = "") -> Outcome:
        step = self._started[peer]
        why = self._overdue.get(peer) or f"{peer} ended{step.where}: {describe(code)}{more}."
        return failure(why, code, step.log)

    def _reap(self) -> dict[str, int]:
        """Exit codes of the processes that ended since the last look."""
        codes = {}
        for peer, step in list(self._steps.items()):
            code = step.poll()
            if code is not None:
                del self._steps[peer]
                codes[peer] = code
                log.info("%s ended: %s", peer, describe(code))
        return codes

    def _measure(self, now: float) -> None:
        self._lock.renew()
        with self._server.locked() as scheduler:
            progress = dict(scheduler.progress)
        if warning := self._boundary.look(progress, now):
            self._note(warning)
        self._record.note(boundary_s=self._boundary.longest_s)
        self._record.renew(peak_pss_bytes=self._peak_pss_bytes)
        if now < self._next_pss or not self._launcher.on_this_host:
            return
        pss = proctree.pss_bytes(proctree.descendants(os.getpid()))
        self._peak_pss_bytes = max(self._peak_pss_bytes, pss)
        # The kernel walks page tables for it: large processes are looked at less often.
        self._next_pss = now + max(_PSS_EVERY_S, 300 * (time.monotonic() - now))

    def _update_display(self, now: float) -> None:
        with self._server.locked() as scheduler:
            phase = scheduler.progress.get("phase")
            cards = scheduler.view(LEADER)["engines"]
        words = {}
        for peer, card in cards.items():
            version = card["version"]
            words[peer] = card["state"] if version is None else f"version {version}"
            if peer in self._restart_at:
                words[peer] = f"restarts in {max(0.0, self._restart_at[peer] - now):.0f} s"
        self._display.update(phase or "starting processes", words)

    # Ending

    def _end_all(self, reason: str, grace_s: float) -> None:
        """Ask the roles to leave, then make them."""
        try:
            if self._steps:
                self._ask_to_leave(reason, grace_s)
        finally:
            self._kill_all()
            deadline = time.monotonic() + MAX_END_S
            while self._steps and time.monotonic() < deadline:
                self._signals.wait(0.05)
                self._reap()
            for peer, step in self._steps.items():  # in a system call that never returns
                log.error("%s, pid %d, does not die; its log: %s", peer, step.pid, step.spec.log)

    def _ask_to_leave(self, reason: str, grace_s: float) -> None:
        with self._server.locked() as scheduler:
            scheduler.request_stop(reason, time.monotonic())
        started, is_terminated = time.monotonic(), False
        while self._steps and (waited := time.monotonic() - started) < grace_s:
            if not is_terminated and waited > grace_s / 2:
                is_terminated = True
                for step in self._steps.values():
                    step.terminate()
            self._signals.wait(0.1)
            self._reap()

    def _kill_all(self) -> None:
        for step in list(self._steps.values()):
            step.kill()

    def _report(self, outcome: Outcome) -> None:
        """The summary on disk and the last words on the screen; a failure's log comes last."""
        summary = write_summary(self._run, self._cfg, status=outcome.status, error=outcome.error)
        if outcome.error is not None:
            log.error("%s", outcome.explanation)
        # Somebody who interrupts does not want to wait for matplotlib.
        picture = None if outcome.status == "interrupted" else self._draw()
        with contextlib.suppress(OSError):  # the terminal may be gone
            # A job says itself what follows, which is decided once this is over.
            has_next = self._launcher.on_this_host or outcome.status == "done"
            show_end(self._run, summary, self._console, picture=picture, has_next=has_next)
            if outcome.error is not None:
                text = f"\n{outcome.explanation}"
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> str:
        path = self._run.root / "reward.png"
        try:
            plot_reward(self._run, path)
        except ModuleNotFoundError as error:
            return f"needs {error.name}: pip install matplotlib"
        except (OSError, ValueError, RuntimeError) as error:
            log.exception("no picture")
            return f"none: {error}"  # a run that is done stays done
        return str(path)

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self._display.note(text)

    def _open_log(self) -> logging.Handler:
        handler = logging.FileHandler(self._attempt.log("supervisor"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        return handler
