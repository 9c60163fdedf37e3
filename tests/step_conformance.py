"""What every way to start steps must do; a subclass of `StepConformance` per launcher."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slurm_grpo.run import proctree
from slurm_grpo.slurm.submit_env import clean_environment
from slurm_grpo.supervisor.steps import Step, StepLauncher, StepSpec

ROOT = Path(__file__).resolve().parents[1]


def spec(tmp_path: Path, *argv: str, peer: str = "engine-0", **env: str) -> StepSpec:
    return StepSpec(
        peer=peer,
        argv=argv,
        env={
            **clean_environment(os.environ),
            "PYTHONPATH": str(ROOT),
            "SLURM_GRPO_INCARNATION": "0",
            **env,
        },
        log=tmp_path / f"{peer}.log",
        exit_file=tmp_path / f"{peer}.exit",
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code))


def wait_for_end(step: Step, timeout_s: float = 60.0) -> int:
    deadline = time.monotonic() + timeout_s
    while (code := step.poll()) is None:
        assert time.monotonic() < deadline, "the step did not end"
        time.sleep(0.02)
    return code


def wait_for_line(path: Path, timeout_s: float = 60.0) -> str:
    """The first whole line a process wrote into a file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or "\n" not in path.read_text():
        assert time.monotonic() < deadline, f"nothing in {path}"
        time.sleep(0.01)
    return path.read_text().splitlines()[0]


def wait_until_gone(*pids: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if proctree.start_ticks(pid) is not None]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


def start(launcher: StepLauncher, one: StepSpec) -> Step:
    return launcher.start([one])[one.peer]


class StepConformance:
    """Needs a fixture `launcher`, prepared for an attempt in `tmp_path`."""

    def test_output_is_appended_and_the_exit_code_is_recorded(
        self, launcher: StepLauncher, tmp_path: Path
    ) -> None:
        code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
        for _ in range(2):
            step = start(launcher, spec(tmp_path, *python(code)))
            assert wait_for_end(step) == 3
        assert (tmp_path / "engine-0.exit").read_text() == "3\n"
        lines = (tmp_path / "engine-0.log").read_text().split()
        assert sorted(lines) == ["err", "err", "out", "out"]

    def test_a_step_killed_by_a_signal_records_its_negative_number(
        self, launcher: StepLauncher, tmp_path: Path
    ) -> None:
        step = start(launcher, spec(tmp_path, *python("import time; time.sleep(600)")))
        step.kill()
        assert wait_for_end(step) == -signal.SIGKILL
        assert (tmp_path / "engine-0.exit").read_text() == "-9\n"

    def test_terminate_after_an_unseen_end_is_harmless(
        self, launcher: StepLauncher, tmp_path: Path
    ) -> None:
        step = start(launcher, spec(tmp_path, *python("raise SystemExit(4)")))
        os.waitid(os.P_PID, step.pid, os.WEXITED | os.WNOWAIT)
        step.terminate()
        assert step.poll() == 4
        step.terminate()
        step.kill()
        assert step.poll() == 4

    def test_a_program_that_does_not_exist_ends_with_a_reason_in_the_log(
        self, launcher: StepLauncher, tmp_path: Path
    ) -> None:
        step = start(launcher, spec(tmp_path, "/no/such/python"))
        assert wait_for_end(step) == 1
        log = (tmp_path / "engine-0.log").read_text()
        assert log == "cannot start /no/such/python: No such file or directory\n"

    @pytest.mark.parametrize("session", ["same", "own"])
    def test_kill_reaches_children_in_this_session_and_in_their_own(
        self, launcher: StepLauncher, tmp_path: Path, session: str
    ) -> None:
        code = f"""
            import subprocess, sys, time
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                     start_new_session={session == "own"})
            print(child.pid, flush=True)
            time.sleep(600)
        """
        step = start(launcher, spec(tmp_path, *python(code)))
        child = int(wait_for_line(tmp_path / "engine-0.log"))
        step.kill()
        wait_for_end(step)
        wait_until_gone(child)

    def test_what_a_crashed_step_leaves_in_its_session_is_removed(
        self, launcher: StepLauncher, tmp_path: Path
    ) -> None:
        code = """
            import os, subprocess, sys
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(child.pid, flush=True)
            os._exit(1)
        """
        step = start(launcher, spec(tmp_path, *python(code)))
        assert wait_for_end(step) == 1
        wait_until_gone(int(wait_for_line(tmp_path / "engine-0.log")))
