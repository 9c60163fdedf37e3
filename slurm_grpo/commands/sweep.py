"""What `launch/sweep.py` does: from SWEEP.yaml to run directories and a job array, or chained jobs.

Runs on the login node. Promises that all elements are checked before anything is made, and that
calling it again submits only elements that have neither finished nor are alive; those that failed
continue from their last checkpoint.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_grpo.commands import submit as launch_cli
from slurm_grpo.commands.command_line import exit_code_of
from slurm_grpo.config.loading import with_values
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError, ExitCode
from slurm_grpo.fsio import write_durably
from slurm_grpo.jobs.submission import snapshot_package, submit_run
from slurm_grpo.run.state import (
    ARRAY_SCRIPT,
    stand,
    stand_all,
    tally,
)
from slurm_grpo.slurm.script import array_script
from slurm_grpo.slurm.submit_env import parse_job_id, run_sbatch
from slurm_grpo.sweeps.directory import Element, compress, plan_elements, write_elements
from slurm_grpo.sweeps.file import describe, read_sweep

_USAGE = "python launch/sweep.py SWEEP.yaml [--submit] [--dry-run] [--section.option VALUE ...]"
_DESCRIPTION = (
    "Makes a run directory for every element of SWEEP.yaml and a batch script for all of them, or "
    "shows what it would make. Options of the configuration change the base, as with submit.py."
)


def main(argv: Sequence[str], start: launch_cli.Supervise | None = None) -> int:
    """Do what `argv` (without the program's name) asks for; the exit code.

    `start` runs an element on this machine, as in `launch_cli.main`.
    """
    return exit_code_of(lambda: _run(argv, start))


def _run(argv: Sequence[str], start: launch_cli.Supervise | None) -> int:
    arguments, overrides = _parser().parse_known_args(argv)
    sweep = read_sweep(arguments.sweep)
    elements = plan_elements(sweep, overrides, arguments.site)
    folder = elements[0].run.root.parent
    kind = _kind(elements, arguments.lanes)
    script = ""
    if kind == "array":
        script = _common_script(elements, folder, arguments.max_running or len(elements))
    if arguments.dry_run:
        for element in elements:
            _say(f"# {element.index:3}  {describe(element.changes)}")
        _say(f"# Would be made in {folder}\n{script}")
        return ExitCode.OK
    write_elements(folder, elements)
    if script:
        _write_script(folder, script)
    todo = _unfinished(elements, strict=arguments.submit)
    if not todo:
        _say(f"Nothing to run. Results: slurm-grpo sweep table {_quote(folder)}")
        return ExitCode.OK
    if not arguments.submit:
        _say_how(folder, todo, kind, arguments)
        return ExitCode.OK
    if kind == "local":
        return _run_here(todo, start)
    if kind == "array":
        _submit_array(folder, todo, arguments.max_running)
    else:
        _submit_lanes(elements, todo, arguments.lanes)
    _say(f" state   slurm-grpo sweep status {_quote(folder)}")
    _say(f" again   `{shlex.join(['python', 'launch/sweep.py', *argv])}` continues what failed")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python launch/sweep.py", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml")
    parser.add_argument("--submit", action="store_true", help="run what has not finished")
    parser.add_argument("--dry-run", action="store_true", help="print all of it, make nothing")
    parser.add_argument("--max-running", type=_positive, metavar="N", help="of an array, at once")
    parser.add_argument(
        "--lanes", type=_positive, metavar="L", help="chained heterogeneous jobs, L at once"
    )
    parser.add_argument("--site", type=Path, metavar="SITE.yaml", help="as with submit.py")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r}")
    return int(text)


def _kind(elements: Sequence[Element], lanes: int | None) -> str:
    """`array`, `lanes` or `local`: how these elements are run. Raises ConfigError."""
    clusters = [element.config.cluster for element in elements]
    kinds = {"local" if c.kind == "local" else c.allocation for c in clusters}
    if len(kinds) > 1:
        raise ConfigError(
            f"cluster.kind, cluster.allocation: {', '.join(sorted(kinds))} in one sweep; expected "
            "one kind for all elements. Make a sweep of each."
        )
    kind = str(kinds.pop())
    if kind == "het" and lanes is None:
        raise ConfigError(
            "cluster.allocation: het, but Slurm refuses job arrays of heterogeneous jobs. Either "
            "give each element one allocation that engines and trainers share (cluster.allocation: "
            "split, with cluster.shared), or pass --lanes L: one job an element, each waiting for "
            "the one before it in its lane, so that L run at once."
        )
    if kind != "het" and lanes is not None:
        raise ConfigError(
            f"--lanes: for heterogeneous jobs, and this sweep is {kind}. Leave it out; an array "
            "takes --max-running."
        )
    return {"het": "lanes", "split": "array"}.get(kind, kind)


def _common_script(elements: Sequence[Element], folder: Path, max_running: int) -> str:
    """The one script of all elements, which must ask Slurm for the same. Raises ConfigError."""
    scripts = [
        array_script(
            element.config, sweep_dir=folder, n_elements=len(elements), max_running=max_running
        )
        for element in elements
    ]
    for element, script in zip(elements, scripts, strict=True):
        if script != scripts[0]:
            lines = difflib.unified_diff(scripts[0].splitlines(), script.splitlines(), n=0)
            shown = "\n".join(f"  {line}" for line in list(lines)[3:] if not line.startswith("@@"))
            raise ConfigError(
                f"elements 0 and {element.index} ask Slurm for different things, which one job "
                f"array cannot:\n{shown}\nVary nothing that changes nodes, GPUs, CPUs or time, or "
                "set cluster.shared to what the largest needs (cpus_per_node, nodes, ...)."
            )
    return scripts[0]


def _write_script(folder: Path, script: str) -> None:
    """The script and what it refers to; the code stays as it was when the sweep was made."""
    (folder / "logs").mkdir(exist_ok=True)
    if not (folder / "code").is_dir():
        shutil.rmtree(partial := folder / "code.partial", ignore_errors=True)  # cut short
        snapshot_package(partial)
        partial.rename(folder / "code")
    write_durably(folder / ARRAY_SCRIPT, script.encode(), mode=0o755)


def _unfinished(elements: Sequence[Element], *, strict: bool) -> list[Element]:
    """Elements to run; prints how many of each kind there are. With `strict`, Slurm must answer."""
    runs = [element.run for element in elements]
    standings = stand_all(runs, strict=strict)
    _say(f"{len(elements)} elements in {runs[0].root.parent}: {tally(standings)}")
    pairs = zip(elements, standings, strict=True)
    return [element for element, s in pairs if not s.is_alive and s.word != "done"]


def _say_how(folder: Path, todo: list[Element], kind: str, arguments: argparse.Namespace) -> None:
    if kind == "array":
        flag = _array_flag(todo, arguments.max_running)
        script = _quote(folder / ARRAY_SCRIPT)
        _say(f"Submit them with --submit, or yourself:\n  sbatch {flag} {script}")
    elif kind == "local":
        _say("Run them here, one after the other, with --submit.")
    else:
        _say(f"Submit them, {arguments.lanes} at once, with --submit.")


def _array_flag(todo: Sequence[Element], max_running: int | None) -> str:
    limit = f"%{max_running}" if max_running else ""
    return f"--array={compress([element.index for element in todo])}{limit}"


def _submit_array(folder: Path, todo: Sequence[Element], max_running: int | None) -> None:
    flag = _array_flag(todo, max_running)
    text = run_sbatch(["--parsable", flag, str(folder / ARRAY_SCRIPT)])
    _say(f"submitted job array {parse_job_id(text)}: {flag.removeprefix('--array=')}")


def _submit_lanes(elements: Sequence[Element], todo: Sequence[Element], n_lanes: int) -> None:
    """One job an element; in each lane, a job waits for the end of the one before it."""
    tails: dict[int, str] = {}
    for element in elements:
        if element in todo:
            continue
        for job_id in stand(element.run).job_ids:  # alive, from an earlier call
            tails[element.index % n_lanes] = job_id
    for element in todo:
        lane = element.index % n_lanes
        submission = submit_run(element.run, _after(element.config, tails.get(lane)))
        tails[lane] = submission.job.job_id
        _say(f"submitted job {tails[lane]} in lane {lane}: {element.run.root.name}")


def _after(cfg: Config, job_id: str | None) -> Config:
    """`cfg` for a job that waits until another has ended, one way or another."""
    if job_id is None:
        return cfg
    flags = (*cfg.cluster.generators.flags, f"--dependency=afterany:{job_id}")
    return with_values(cfg, {"cluster.generators.flags": flags})


def _run_here(todo: Sequence[Element], start: launch_cli.Supervise | None) -> int:
    """One element after the other; those after a failed one too, but not after an interruption."""
    worst = int(ExitCode.OK)
    for element in todo:
        _say(f"\n{element.run.root.name}: {describe(element.changes)}")
        code = launch_cli.main(["--resume", str(element.run.root)], start)
        if code > 128 or code == ExitCode.STOPPED:
            return code
        worst = max(worst, code)
    return worst


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
