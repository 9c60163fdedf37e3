"""`slurm-grpo status RUN`: what a run is doing, on one screen, or as JSON for programs.

Everything comes from the run directory, and from Slurm where it knows the job; nothing of the run
is asked or disturbed. Works for local runs, and for a copy of a run directory anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import RUN_HELP, Standing, element_number, find_run, stand
from slurm_grpo.run.step_feed import StepFeed
from slurm_grpo.run.summary import evaluations
from slurm_grpo.run.words import (
    before_after,
    clock,
    facts_table,
    number,
    print_paths,
    reward_line,
    tokens_per_s,
)

_N_WARNINGS = 3
_WARNING = re.compile(r"\S+ (\d\d:\d\d:\d\d),\d+ (?:WARNING|ERROR|CRITICAL) \S+: (.*)")
_RESTART = re.compile(r"INFO \S+: started engine-\d+, incarnation [1-9]")
_DAY_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    directory = find_run(arguments.run)
    report = build_report(directory, read_frozen(directory.config), stand(directory))
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        show(report, Console())
    return ExitCode.OK


def build_report(run: RunDir, cfg: Config, standing: Standing) -> dict[str, Any]:
    """Everything `status` knows; a value is None where there is none yet. Times in seconds."""
    feed = StepFeed(run)
    last, rewards = feed.last, feed.rewards
    is_at_work = standing.word in ("starting", "running")  # nobody knows how long a queue is
    remaining = feed.remaining_s(cfg.run.steps) if is_at_work else None
    warnings, n_restarts = _read_log(run, standing.attempt)
    record = standing.record
    wall_s = time.time() - record["started_unix"] if standing.word == "running" else None
    return {
        "run": str(run.root),
        "seed": cfg.run.seed,
        "state": standing.word,
        "detail": standing.detail,
        "attempt": standing.attempt,
        "n_attempts": len(run.attempt_numbers()),
        "job": _job(cfg, standing),
        "host": record.get("host"),
        "wall_s": record.get("wall_s") if wall_s is None else round(wall_s, 3),
        "step": feed.n_steps,
        "steps": cfg.run.steps,
        "version": max((row["step"] for row in feed.rows), default=None),
        "checkpoint": latest_complete(run),
        "rewards": rewards,
        "reward": rewards[-1] if rewards else None,
        "reward_change": _change(rewards),
        "eval": evaluations(feed.rows),
        "staleness": last.get("staleness/mean"),
        "step_s": last.get("trainer/step_s"),
        "generated_tokens_per_s": last.get("generator/tokens_per_s"),
        "trained_tokens_per_s": last.get("trainer/tokens_per_s"),
        "remaining_s": remaining,
        "ends_unix": None if remaining is None else time.time() + remaining,
        "engine_restarts": n_restarts,
        "warnings": warnings,
        "logs": None if standing.attempt is None else str(run.attempt(standing.attempt).root),
        "slurm_out": _slurm_out(run),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report for a person."""
    table = facts_table(f"{Path(report['run']).name}: {report['state']}")
    for name, text in _lines(report, console):
        table.add_row(name, text)
    console.print(table)
    keys = {"logs": "logs", "job output": "slurm_out", "run directory": "run"}
    print_paths(console, {name: report[key] for name, key in keys.items()})


def _lines(report: dict[str, Any], console: Console) -> list[tuple[str, Text]]:
    """(label, text) of what there is to say."""
    lines: list[tuple[str, str | Text]] = []
    if report["detail"]:
        lines.append(("why", report["detail"]))
    lines += _job_lines(report["job"])
    lines.append(("attempt", _attempt_line(report)))
    lines.append(("step", _step_line(report)))
    if report["version"] is not None:
        saved = "none" if report["checkpoint"] is None else f"step {report['checkpoint']}"
        lines.append(("policy version", f"{report['version']}   checkpoint {saved}"))
    if report["rewards"]:
        reward = reward_line(report["rewards"], console)
        if report["reward_change"] is not None:
            reward.append(f"  {report['reward_change']:+.3f} lately")
        lines.append(("reward", reward))
    for name, points in report["eval"].items():
        lines.append((f"{name.replace('_', '-')} {points['metric']}", before_after(points)))
    if report["step_s"] is not None:
        lines.append(("staleness", number(report["staleness"], 1)))
        speeds = tokens_per_s(report["generated_tokens_per_s"], report["trained_tokens_per_s"])
        lines.append(("tokens/s", f"{speeds}   {report['step_s']:.1f} s a step"))
    news = [w for w in report["warnings"] if not report["detail"] or report["detail"] not in w]
    for index, warning in enumerate(news):
        lines.append(("last warnings" if index == 0 else "", Text(warning, style="yellow")))
    return [(name, Text(text) if isinstance(text, str) else text) for name, text in lines]


def _job_lines(job: dict[str, Any] | None) -> list[tuple[str, str]]:
    if job is None:
        return []
    lines = [("job", job["id"])]
    for part in job["components"]:
        words = [part["state"]]
        if part["nodes"]:
            words.append(f"on {part['nodes']}")
        elif part["reason"] not in ("", "None"):
            words.append(f"({part['reason']})")
        if part["state"] == "RUNNING":
            words.append(f"for {part['elapsed']}, {part['left'] or '?'} left")
        elif part["state"] == "PENDING" and part["start"] not in ("", "N/A"):
            words.append(f"expected {part['start'].replace('T', ' ')}")
        lines.append((f"  {part['name']}", " ".join(words)))
    return lines


def _attempt_line(report: dict[str, Any]) -> str:
    if report["attempt"] is None:
        return "none yet"
    words = [f"{report['attempt']} on {report['host'] or 'an unknown host'}"]
    if report["wall_s"] is not None:
        words.append(f"for {clock(report['wall_s'])}")
    restarts = report["engine_restarts"]
    if restarts:
        words.append(f"{restarts} engine restart{'s' if restarts > 1 else ''}")
    return ", ".join(words)


def _step_line(report: dict[str, Any]) -> str:
    text = f"{report['step']}/{report['steps']}"
    if report["remaining_s"] is None:
        return text
    form = "%H:%M" if report["remaining_s"] < _DAY_S else "%a %d %b %H:%M"
    ends = time.strftime(form, time.localtime(report["ends_unix"]))
    return f"{text}   ETA {clock(report['remaining_s'])}, about {ends}"


def _job(cfg: Config, standing: Standing) -> dict[str, Any] | None:
    """Slurm's view, one entry a component."""
    if not standing.components:
        return None
    het = cfg.cluster.allocation == "het" and len(standing.components) > 1
    first = standing.components[0]
    return {
        "id": first.job_id if first.task is None else f"{first.job_id}_{first.task}",
        "components": [
            {
                "name": ("generators", "trainers")[c.component] if het else "nodes",
                "state": c.state,
                "nodes": c.nodes,
                "reason": c.reason,
                "elapsed": c.elapsed,
                "left": c.left,
                "start": c.start,
            }
            for c in standing.components
        ],
    }


def _change(rewards: Sequence[float]) -> float | None:
    """Mean of the last five rewards less that of the five before (of fewer, while there are)."""
    n = min(5, len(rewards) // 2)
    return statistics.fmean(rewards[-n:]) - statistics.fmean(rewards[-2 * n : -n]) if n else None


def _read_log(run: RunDir, attempt: int | None) -> tuple[list[str], int]:
    """The last warnings of the attempt's supervisor, and how often it restarted an engine."""
    if attempt is None:
        return [], 0
    try:
        text = run.attempt(attempt).log("supervisor").read_text(errors="replace")
    except FileNotFoundError:
        return [], 0
    warnings = [f"{m[1]} {m[2]}" for line in text.splitlines() if (m := _WARNING.match(line))]
    return warnings[-_N_WARNINGS:], len(_RESTART.findall(text))


def _slurm_out(run: RunDir) -> str | None:
    """Output of the newest job, which has what went wrong before the supervisor had a log."""
    paths = [p for folder in run.job_dirs() if (p := folder / "slurm.out").is_file()]
    if (number := element_number(run)) is not None:
        paths += (run.root.parent / "logs").glob(f"*_{number}.out")
    return str(max(paths, key=lambda p: p.stat().st_mtime)) if paths else None
