"""What `launch/submit.py` does: from arguments to a checked configuration, a run directory and a
supervisor.

Runs on the login node, in well under a second up to the supervisor. Promises that nothing is made
or started while anything is wrong, and that an existing run is continued or left alone, never
overwritten. Knows nothing about how the run proceeds.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from slurm_grpo import config_io
from slurm_grpo.checkpoint_dirs import latest_complete
from slurm_grpo.config import Config
from slurm_grpo.errors import ConfigError, SlurmGrpoError
from slurm_grpo.fsio import storage_errors
from slurm_grpo.rundir import RunDir

_PROGRAM = "python launch/submit.py"
_USAGE = f"""{_PROGRAM} CONFIG.yaml [--section.option VALUE ...] [--dry-run]
       {_PROGRAM} --resume RUN_DIR [--run.steps N] [--dry-run]"""
# tyro wraps paragraphs at no width of its own, and keeps the lines that begin with a space.
_DESCRIPTION = f"""\
  Start a run:     {_PROGRAM} CONFIG.yaml [OPTIONS] [--dry-run]
  Continue a run:  {_PROGRAM} --resume RUN_DIR [--run.steps N]
  CONFIG.yaml sets the options below, nested by their dots; options given here
  win. --dry-run checks everything, shows the resolved configuration and what
  would start, and ends. With CONFIG.yaml, the defaults below are the file's.
"""


Supervise: TypeAlias = Callable[[RunDir, Config], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The command line, taken apart."""

    config: Path | None
    resume: Path | None
    overrides: list[str]
    dry_run: bool
    help: bool


def main(argv: Sequence[str], start: Supervise | None = None) -> int:
    """Do what `argv` (without the program's name) asks for; the exit code.

    `start` runs the attempt, `run_supervisor` by default.
    """
    try:
        arguments = parse(argv)
        if arguments.help or arguments.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
        if arguments.help:
            return _print_help(arguments.config)
        if arguments.resume is not None:
            run, cfg = _resumed(arguments.resume, arguments.overrides)
        else:
            if arguments.config is None:
                raise ConfigError(f"no configuration given.\nusage: {_USAGE}")
            cfg = config_io.load_config(arguments.config, arguments.overrides)
            run = RunDir(Path(cfg.run.runs_dir) / cfg.run.name)
            _refuse_existing(run)
        if arguments.dry_run:
            sys.stdout.write(describe(run, cfg))
            return 0
        _require_role_packages(cfg)
        with storage_errors("make the run directory", run.root):
            run.create()
        if not config_io.freeze_config(cfg, run.config, replace=arguments.resume is not None):
            raise ConfigError(
                f"run.name: {run.root} was just taken by a run with another configuration. Choose "
                "another --run.name, or remove the directory if nothing runs there."
            )
        return (start or _supervise)(run, cfg)
    except SlurmGrpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _require_role_packages(cfg: Config) -> None:
    """Raise before anything is made if this interpreter, which the roles get, cannot run them."""
    missing = [name for name in ("torch", "vllm", "torchtitan") if find_spec(name) is None]
    if missing and cfg.cluster.python in (None, sys.executable):
        raise ConfigError(
            f"cluster.python: {sys.executable} lacks {', '.join(missing)}, which the roles need. "
            "Run `bash launch/quickstart.sh` once and use .venv/bin/python, or name an interpreter "
            "that has them with --cluster.python."
        )


def _supervise(run: RunDir, cfg: Config) -> int:
    # Here: a configuration error should not wait for its imports.
    from slurm_grpo.supervisor import run_supervisor

    return run_supervisor(run, cfg)


def parse(argv: Sequence[str]) -> Arguments:
    """Split the command line; options of the configuration are passed on as they are."""
    config, resume = None, None
    overrides: list[str] = []
    dry_run = show_help = False
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            show_help = True
        elif word in ("--dry-run", "--dry_run"):
            dry_run = True
        elif word == "--resume" or word.startswith("--resume="):
            value = word.partition("=")[2] or next(words, "")
            if not value or value.startswith("--"):
                raise ConfigError("--resume: expected a run directory, such as runs/my-run.")
            resume = Path(value)
        elif config is None and not overrides and not word.startswith("-"):
            config = Path(word)
        else:
            overrides.append(word)
    if config is not None and resume is not None:
        raise ConfigError(
            f"{config}: not used with --resume, since {resume} holds the run's own configuration. "
            "Leave one of them out."
        )
    return Arguments(
        config=config, resume=resume, overrides=overrides, dry_run=dry_run, help=show_help
    )


def describe(run: RunDir, cfg: Config) -> str:
    """The resolved configuration, and what would be started."""
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


def _refuse_existing(run: RunDir) -> None:
    numbers = run.attempt_numbers()
    if not numbers:
        return
    _refuse_live(run)
    raise ConfigError(
        f"run.name: {run.root} holds a run already ({len(numbers)} attempt"
        f"{'s' if len(numbers) > 1 else ''}). Continue it with --resume {run.root}, or choose "
        "another --run.name."
    )


def _refuse_live(run: RunDir) -> None:
    """Raise, naming it, if a supervisor is at work there; it looks again itself when it starts."""
    from slurm_grpo.attempt import RunLock

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
    _refuse_live(run)
    strangers = [w for w in overrides if w.startswith("-") and w.partition("=")[0] != "--run.steps"]
    if strangers:
        raise ConfigError(
            f"{strangers[0]}: a resumed run keeps its configuration; only --run.steps can be "
            "changed. Start a new run for anything else."
        )
    cfg = config_io.load_config(run.config, overrides)
    done = latest_complete(run) or 0
    if done > cfg.run.steps or (done == cfg.run.steps and _is_finished(run)):
        raise ConfigError(
            f"--resume: {root} has taken {done} steps already, and run.steps is {cfg.run.steps}. "
            "Pass --run.steps with a larger number to train on."
        )
    return run, cfg


def _is_finished(run: RunDir) -> bool:
    """Whether the last attempt came to its end: evaluated and exported too, not just trained."""
    try:
        return bool(json.loads(run.summary.read_text())["status"] == "done")
    except (FileNotFoundError, ValueError):
        return False


def _print_help(config: Path | None) -> int:
    import tyro

    cfg = Config() if config is None else config_io.load_config(config, check=False)
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
