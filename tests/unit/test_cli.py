"""The `slurm-grpo` command: it lists, dispatches and explains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_grpo.commands.main import COMMANDS, main
from slurm_grpo.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("status", "logs", "cancel", "resume", "sweep status", "sweep table")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_a_family_lists_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == main(["sweep"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "sweep table" in text
    assert "doctor" not in text


def test_an_unknown_command_is_an_error_that_lists_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stats", "r"]) == ExitCode.CONFIG
    text = capsys.readouterr().err
    assert "no command 'stats r'" in text
    assert "  status " in text


@pytest.mark.parametrize("name", QUICK)
def test_a_command_that_follows_a_run_starts_at_once_and_without_torch(name: str) -> None:
    assert importlib.util.find_spec(f"slurm_grpo.{COMMANDS[name][0]}") is not None
    script = (
        "import sys, time; start = time.process_time()\n"
        "from slurm_grpo.commands.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(time.process_time() - start)\n"
        "heavy = {'torch', 'vllm', 'h5py', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )

    def seconds() -> float:
        done = subprocess.run(
            [sys.executable, "-c", script, *name.split(), "no-such-run"],
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == ExitCode.CONFIG, done.stderr
        assert done.stderr.startswith("error: no-such-run: no ")
        return float(done.stdout)

    assert any(seconds() < 0.5 for _ in range(3))


def test_a_reader_that_goes_away_ends_a_command_quietly() -> None:
    line = (
        "from slurm_grpo.commands.main import main; raise SystemExit(main(['episodes', 'schema']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.close()
    _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (128 + signal.SIGPIPE, b"")
