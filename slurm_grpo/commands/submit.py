"""What `launch/submit.py` does: from arguments to a checked configuration, a run directory, and a
supervisor in the foreground or a job in Slurm's queue.

Runs on the login node, in well under a second. Promises that nothing is made
or started while anything is wrong, and that an existing run is continued or left alone, never
overwritten. Knows nothing about how the run proceeds.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from slurm_grpo.checks.load import load_config
from slurm_grpo.commands.command_line import exit_code_of
from slurm_grpo.config import loading as config_io
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import (
    ConfigError,
    ExitCode,
    SlurmUnavailable,
    StorageError,
    SubmissionRefused,
)
from slurm_grpo.fsio import storage_errors
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.summary import is_done
from slurm_grpo.slurm.submit_env import require_sbatch

_PROGRAM = "python launch/submit.py"
_USAGE = f"""{_PROGRAM} CONFIG.yaml [--site SITE.yaml] [--section.option VALUE ...]
       {_PROGRAM} --resume RUN_DIR [--run.steps N]
       each with [--dry-run | --test-only | --wait]"""
# tyro wraps paragraphs at no width of its own, and keeps the lines that begin with a space.
_DESCRIPTION = f"""\
  Start a run:     {_PROGRAM} CONFIG.yaml [OPTIONS] [--dry-run]
  Continue a run:  {_PROGRAM} --resume RUN_DIR [--run.steps N]
  CONFIG.yaml sets the options below, nested by their dots; options given here
  win. --dry-run checks everything, shows the resolved configuration and what
  would start, and ends. With CONFIG.yaml, the defaults below are the file's.
  With cluster.kind slurm, a job is submitted:
    --site SITE.yaml  fills the section `site`; what CONFIG.yaml says wins
    --dry-run         prints the exact batch script instead; needs no Slurm
    --test-only       asks Slurm when it would start instead
    --wait            follows it and ends with the run's result
"""

Supervise: TypeAlias = Callable[[RunDir, Config], int]


def main(argv: Sequence[str], start: Supervise | None = None) -> int:
    """Do what `argv` (without the program's name) asks for; the exit code.

    `start` runs the attempt; by default, what `cluster.kind` says does, or puts it into a queue.
    """
    return exit_code_of(lambda: _run(argv, start))


def _run(argv: Sequence[str], start: Supervise | None) -> int:
    arguments = _parse(argv)
    if arguments.help:
        return _print_help(arguments.config)
    run, cfg = _asked_for(arguments)
    if arguments.dry_run:
        sys.stdout.write(describe(run, cfg))
        return 0
    if arguments.test_only:
        return _test_only(run, cfg)
    require_packages(cfg, "torch", "vllm", "torchtitan")
    if start is None and cfg.cluster.kind == "slurm":
        return _submit(run, cfg, arguments)
    _make(run, cfg, replace=arguments.resume is not None)
    # Imported here: a configuration error should not wait for it.
    from slurm_grpo.supervisor.supervisor import supervise

    return start(run, cfg) if start is not None else supervise(run, cfg).exit_code


def _asked_for(arguments: argparse.Namespace) -> tuple[RunDir, Config]:
    """The run to start or continue, checked; nothing is made yet."""
    if arguments.resume is not None:
        return _resumed(arguments.resume, arguments.overrides)
    if arguments.config is None:
        raise ConfigError(f"no configuration given.\nusage: {_USAGE}")
    cfg = load_config(arguments.config, arguments.overrides, site=arguments.site)
    run = RunDir(Path(cfg.run.runs_dir) / cfg.run.name)
    _refuse_existing(run, cfg)
    return run, cfg


def _make(run: RunDir, cfg: Config, *, replace: bool) -> None:
    with storage_errors("make the run directory", run.root):
        run.create()
    if not config_io.freeze_config(cfg, run.config, replace=replace):
        raise ConfigError(
            f"run.name: {run.root} was just taken by a run with another configuration. Choose "
            "another --run.name, or remove the directory if nothing runs there."
        )


def require_packages(cfg: Config, *names: str) -> None:
    """Raise before anything is made if this interpreter, which the roles get, cannot run them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing and cfg.cluster.python in (None, sys.executable):
        raise ConfigError(
            f"cluster.python: {sys.executable} lacks {', '.join(missing)}, which the roles need. "
            "Run `bash launch/quickstart.sh` once and use .venv/bin/python, or name an interpreter "
            "that has them with --cluster.python."
        )


def _submit(run: RunDir, cfg: Config, arguments: argparse.Namespace) -> int:
    from slurm_grpo.jobs.submission import submit_run, wait_for_end

    require_sbatch()
    is_new = not run.root.exists()
    _make(run, cfg, replace=arguments.resume is not None)
    try:
        submission = submit_run(run, cfg)
    except (SubmissionRefused, SlurmUnavailable, StorageError):
        if is_new:  # or the next try would meet this one's configuration
            shutil.rmtree(run.root, ignore_errors=True)
        raise
    job_id, where = submission.job.job_id, shlex.quote(str(run.root))
    command = Path(sys.executable).with_name("slurm-grpo")
    program = shlex.quote(str(command)) if command.is_file() else "slurm-grpo"
    sys.stdout.write(
        f"submitted job {job_id}\n"
        f" run directory  {run.root}\n"
        f" state          {program} status {where}\n"
        f" follow         {program} logs --follow {where}\n"
        f" cancel         {program} cancel {where}\n"
    )
    sys.stdout.flush()
    if not arguments.wait:
        return ExitCode.OK
    try:
        return wait_for_end(submission)
    except KeyboardInterrupt:
        sys.stderr.write(f"\njob {job_id} goes on; `{program} cancel {where}` ends it.\n")
        return 128 + signal.SIGINT


def _test_only(run: RunDir, cfg: Config) -> int:
    from slurm_grpo.jobs.submission import expected_start

    if cfg.cluster.kind == "local":
        raise ConfigError(
            "--test-only: asks Slurm, and cluster.kind is local. Use --dry-run, or set the kind."
        )
    sys.stdout.write(expected_start(run, cfg))
    return ExitCode.OK


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line taken apart; options of the configuration are passed on as they are, in
    `overrides`."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, usage=_USAGE, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--resume", type=_path, metavar="RUN_DIR")
    parser.add_argument("--site", type=_path, metavar="SITE.yaml")
    for names in (
        ("-h", "--help"),
        ("--dry-run", "--dry_run"),
        ("--test-only", "--test_only"),
        ("--wait",),
    ):
        parser.add_argument(*names, action="store_true")
    found, words = parser.parse_known_args(argv)
    found.config = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    found.overrides = words
    if found.resume is not None and (other := found.config or found.site):
        raise ConfigError(
            f"{other}: not used with --resume, since {found.resume} holds the run's own "
            "configuration. Leave one of them out."
        )
    return found


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got nothing")
    return Path(text)


def describe(run: RunDir, cfg: Config) -> str:
    """The resolved configuration and what would be started; or the script of the job."""
    if cfg.cluster.kind == "slurm":
        from slurm_grpo.jobs.submission import script_of_next

        return script_of_next(run, cfg)
    resume = ""
    if numbers := run.attempt_numbers():
        resume = f", attempt {max(numbers) + 1}, continuing after step {latest_complete(run) or 0}"
    python = cfg.cluster.python or sys.executable
    generator, trainer = cfg.generator, cfg.trainer
    lines = [
        config_io.config_yaml(cfg),
        "# Would start, on this machine:",
        f"#   supervisor          in the foreground{resume}",
        *(
            f"#   {f'engine-{i}':<18}  {python} -m slurm_grpo.generator.role, "
            f"{generator.threads} threads, tensor parallel {generator.engine.tensor_parallel}"
            for i in range(generator.n_engines)
        ),
        *(
            f"#   {f'trainer-{i}':<18}  {python} -m slurm_grpo.trainer.role, "
            f"{trainer.threads} threads"
            for i in range(trainer.n_ranks)
        ),
        f"# Run directory: {run.root}",
    ]
    return "\n".join(lines) + "\n"


def _refuse_existing(run: RunDir, cfg: Config) -> None:
    n_begun = len(run.attempt_numbers())
    n_submitted = len(list(run.jobs.glob("*/job_id"))) if cfg.cluster.kind == "slurm" else 0
    if not n_begun and not n_submitted:
        return
    _refuse_live(run, cfg)
    held = f"{n_begun} attempt{'s' if n_begun != 1 else ''}"
    raise ConfigError(
        f"run.name: {run.root} holds a run already ({held}). Continue it with --resume "
        f"{run.root}, or choose another --run.name."
    )


def _refuse_live(run: RunDir, cfg: Config) -> None:
    """Raise, naming it, if a job of the run is queued or a supervisor at work there; a supervisor
    looks again itself when it starts."""
    if cfg.cluster.kind == "slurm":
        from slurm_grpo.jobs.submission import refuse_live_job

        return refuse_live_job(run)
    from slurm_grpo.run.attempt import RunLock

    lock = RunLock(run)
    lock.acquire()
    lock.release()


def _resumed(root: Path, overrides: Sequence[str]) -> tuple[RunDir, Config]:
    """The run in `root` with its frozen configuration; only its length may be changed."""
    run = RunDir(root.absolute())
    if not run.config.is_file():
        raise ConfigError(
            f"--resume: {root} is no run directory (no config.yaml in it). Give a directory that a "
            "run has made, such as runs/my-run."
        )
    strangers = [w for w in overrides if w.startswith("-") and w.partition("=")[0] != "--run.steps"]
    if strangers:
        raise ConfigError(
            f"{strangers[0]}: a resumed run keeps its configuration; only --run.steps can be "
            "changed. Start a new run for anything else."
        )
    cfg = load_config(run.config, overrides)
    _refuse_live(run, cfg)
    done = latest_complete(run) or 0
    if done > cfg.run.steps or (done == cfg.run.steps and is_done(run)):
        raise ConfigError(
            f"--resume: {root} has taken {done} steps already, and run.steps is {cfg.run.steps}. "
            "Pass --run.steps with a larger number to train on."
        )
    return run, cfg


def _print_help(config: Path | None) -> int:
    import tyro

    cfg = Config() if config is None else config_io.read_config(config)
    try:
        tyro.cli(
            Config,
            prog=f"{_PROGRAM} CONFIG.yaml",
            description=_DESCRIPTION,
            args=["--help"],
            default=cfg,
            use_underscores=True,
        )
    except SystemExit:
        return 0
    return 1
