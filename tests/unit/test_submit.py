"""`launch/submit.py`: what it prints, refuses, makes and starts, and how soon."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from model_shell import make_model_shell
from slurm_grpo.commands.submit import main
from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.config.values import option_types
from slurm_grpo.errors import ExitCode
from slurm_grpo.jobs.submission import _new_job_dir
from slurm_grpo.run import proctree
from slurm_grpo.run.checkpoints import COMPLETE
from slurm_grpo.run.directory import RunDir

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ROOT / "launch/submit.py"
PLAIN = ROOT / "configs/sites/plain.yaml"
HEAVY = {"torch", "vllm", "torchtitan", "transformers", "h5py"}


class RecordedStarts:
    """In the supervisor's place: notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[RunDir, Config]] = []

    def __call__(self, run: RunDir, cfg: Config) -> int:
        self.calls.append((run, cfg))
        run.attempt(len(run.attempt_numbers())).root.mkdir()
        return 7


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in the current directory that can run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.yaml"
    settings = {"model": {"path": str(make_model_shell(tmp_path / "model"))}, "run": {"name": "r"}}
    path.write_text(yaml.safe_dump(settings))
    return path


def finish(run: RunDir) -> None:
    """Leave behind what a finished run does."""
    run.summary.write_text('{"status": "done", "steps": 40}')
    run.checkpoint(40).mkdir(parents=True)
    (run.checkpoint(40) / COMPLETE).touch()


def submit(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUBMIT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_dry_run_shows_the_resolved_configuration_and_makes_nothing(
    config: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    done = submit(config, "--dry-run", "--generator.n_engines", 2, "--trainer.optimizer.lr", "1e-5")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["generator"]["n_engines"] == 2
    assert shown["trainer"]["schedule"]["decay"] == "constant"
    assert re.findall(r"(?:engine|trainer)-\d", done.stdout) == [
        "engine-0",
        "engine-1",
        "trainer-0",
    ]
    assert f"Run directory: {tmp_path}/runs/r" in done.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_it_works_from_any_directory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    done = submit(config, "--dry-run", "--run.runs_dir", tmp_path / "elsewhere", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert f"Run directory: {tmp_path}/elsewhere/r" in done.stdout


def test_all_problems_go_to_standard_error_and_end_with_the_configuration_exit_code(
    config: Path,
) -> None:
    done = submit(config, "--run.steps", 0, "--algorithm.group_size", 1, "--rnu.seed", 1)
    assert done.returncode == ExitCode.CONFIG
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: 3 problems in the configuration {config}:\n")


def test_help_documents_every_option_within_eighty_columns() -> None:
    done = submit("--help", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for key in option_types(Config):
        assert f"--{key}" in done.stdout
    assert "--resume RUN_DIR" in done.stdout
    assert "--dry-run" in done.stdout


def test_help_shows_a_configurations_values_as_defaults(config: Path) -> None:
    assert "(default: r)" in submit(config, "--help", COLUMNS="80").stdout


def test_no_heavy_module_is_imported_on_the_way(config: Path) -> None:
    script = (
        "import runpy, sys\n"
        "submit, *sys.argv[1:] = sys.argv[1:]\n"
        "try: runpy.run_path(submit, run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"sys.exit(str(set(sys.modules) & {HEAVY}) if set(sys.modules) & {HEAVY} else 0)\n"
    )
    dry_run = [config, "--dry-run", "--run.seed", "1"]
    on_slurm = [config, "--dry-run", "--cluster.kind", "slurm"]
    for arguments in (["--help"], dry_run, on_slurm, [config, "--no.such"]):
        command = [sys.executable, "-c", script, str(SUBMIT), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (["--dry-run"], 0.7),
        (["--dry-run", "--cluster.kind", "slurm", "--site", str(PLAIN)], 0.7),
        (["--dry-run", "--trainer.optimizer.lr", "1e-5"], 0.7),
        (["--trainer.optimizer.lr", "fast"], 0.7),
        (["--help"], 1.2),
    ],
)
def test_it_answers_at_once(config: Path, arguments: list[str], limit_s: float) -> None:
    def seconds() -> float:
        before, start = os.times(), time.monotonic()
        submit(config, *arguments)
        wall_s, after = time.monotonic() - start, os.times()
        return min(wall_s, sum(after[2:4]) - sum(before[2:4]))

    # Processor time, and the best of a few, since other work on a test machine must not decide.
    assert any(seconds() < limit_s for _ in range(5))


def test_a_run_is_frozen_then_started_and_its_exit_code_passed_on(config: Path) -> None:
    start = RecordedStarts()
    assert main([str(config), "--run.seed", "3"], start) == 7
    [(run, cfg)] = start.calls
    assert run.root == config.parent / "runs/r"
    assert cfg.run.seed == 3
    assert read_frozen(run.config) == cfg
    assert run.episodes.is_dir()


def test_an_existing_run_is_not_started_again(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = RecordedStarts()
    main([str(config)], start)
    frozen = (config.parent / "runs/r/config.yaml").read_bytes()
    assert main([str(config), "--run.seed", "3"], start) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert "runs/r holds a run already (1 attempt)" in error
    assert f"--resume {config.parent}/runs/r" in error
    assert "--run.name" in error
    assert len(start.calls) == 1
    assert (config.parent / "runs/r/config.yaml").read_bytes() == frozen


@pytest.mark.parametrize("how", ["again", "resume"])
def test_a_live_run_is_refused_naming_its_supervisor(
    how: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = RecordedStarts()
    main([str(config)], start)
    run = start.calls[0][0]
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_ticks": proctree.start_ticks(os.getpid()),
    }
    (run.root / "supervisor.lock").write_text(json.dumps(holder))
    arguments = [str(config)] if how == "again" else ["--resume", str(run.root)]
    assert main(arguments, start) == ExitCode.CONFIG
    assert f"host {socket.gethostname()}, pid {os.getpid()}" in capsys.readouterr().err
    assert len(start.calls) == 1


def test_a_resumed_run_keeps_its_configuration_and_may_be_longer(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RecordedStarts()
    main([str(config), "--run.seed", "3"], start)
    config.unlink()
    monkeypatch.chdir("runs")
    assert main(["--resume", "r", "--run.steps", "50"], start) == 7
    first, second = start.calls
    assert second[0] == first[0]
    assert second[1].run.steps == 50
    assert second[1].run.seed == 3
    assert read_frozen(second[0].config) == second[1]


def test_a_finished_run_can_be_made_longer(config: Path) -> None:
    start = RecordedStarts()
    main([str(config)], start)
    finish(start.calls[0][0])
    assert main(["--resume", "runs/r", "--run.steps", "41"], start) == 7
    shown = submit("--resume", "runs/r", "--run.steps", "60", "--dry-run").stdout
    assert "attempt 2, continuing after step 40" in shown
    assert "steps: 60" in shown


def test_of_two_runs_of_one_name_at_once_the_second_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = RecordedStarts()
    main([str(config)], start)
    start.calls[0][0].attempt(0).root.rmdir()  # not begun yet
    assert main([str(config), "--run.seed", "3"], start) == ExitCode.CONFIG
    assert "was just taken by a run with another configuration" in capsys.readouterr().err
    assert read_frozen(start.calls[0][0].config).run.seed == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume", "runs/r", "--run.seed", "1"], "--run.seed: a resumed run keeps"),
        (["--resume", "runs/r"], "has taken 40 steps already, and run.steps is 40"),
        (["--resume", "runs"], "runs is no run directory"),
        (["c.yaml", "--resume", "runs/r"], "c.yaml: not used with --resume"),
        ([], "no configuration given"),
        (["gone.yaml"], "cannot read the configuration gone.yaml: No such file"),
    ],
)
def test_what_cannot_be_started_is_explained(
    arguments: list[str], expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = RecordedStarts()
    main([str(config)], start)
    finish(start.calls[0][0])
    assert main(arguments, start) == ExitCode.CONFIG
    assert expected in capsys.readouterr().err
    assert len(start.calls) == 1


def test_a_dry_run_for_slurm_prints_the_script_alone_and_needs_no_slurm(
    config: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    done = submit(config, "--cluster.kind", "slurm", "--dry-run", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines.count("#SBATCH hetjob") == 1
    assert f"#SBATCH --output={tmp_path}/runs/r/jobs/0/slurm.out" in lines
    entry = f"{sys.executable} -u -m submitit.core._submit {tmp_path}/runs/r/jobs/0"
    assert lines[-1] == f"exec {entry}"
    assert sorted(tmp_path.iterdir()) == before


def test_the_configuration_wins_over_the_site_file_and_options_over_both(
    config: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("gpu_type: a100\nmpi: pmix\nsetup: [module load site]\n")
    own = yaml.safe_load(config.read_text()) | {"site": {"mpi": "none", "setup": ["true"]}}
    config.write_text(yaml.safe_dump(own))
    shown = submit(config, "--site=site.yaml", "--site.setup", "module load mine", "--dry-run")
    resolved = yaml.safe_load(shown.stdout)["site"]
    assert resolved["gpu_type"] == "a100"
    assert resolved["mpi"] == "none"
    assert resolved["setup"] == ["module load mine"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--test-only"], "--test-only: asks Slurm, and cluster.kind is local"),
        (["--resume"], "--resume: expected one argument"),
        (["--resume", ""], "--resume: expected a path, got nothing"),
        (["--site"], "--site: expected one argument"),
        (["--site", "gone.yaml"], "cannot read the configuration gone.yaml"),
        (["--cluster.kind", "slurm", "--cluster.python", "/bin/sh"], "sbatch: no such command"),
    ],
)
def test_what_slurm_cannot_be_asked_is_explained_and_makes_nothing(
    arguments: list[str], expected: str, config: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    done = submit(config, *arguments, PATH="/nowhere")
    assert done.returncode != 0
    assert expected in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_submission_that_was_refused_since_it_was_listed_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "r")
    monkeypatch.setattr(RunDir, "job_dirs", lambda run: [run.jobs / "0"])
    with _new_job_dir(run) as job_dir:
        assert job_dir == run.jobs / "1"
        assert job_dir.is_dir()
