"""What a person watching the supervisor sees: a live panel on a terminal, a line a step elsewhere,
a table at the end.

The supervisor feeds it: `update` with what it knows (cheap to call often), `note` for events,
`close` before the last words, then `show_end`. Steps are read from `metrics/trainer.jsonl`, so none
is missed however fast they come.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slurm_grpo.config.schema import Config
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import Row
from slurm_grpo.run.step_feed import StepFeed
from slurm_grpo.run.summary import PHASES, Summary, evaluations
from slurm_grpo.run.versions import PACKAGE_ROOT
from slurm_grpo.run.words import (
    PHASE_LABELS,
    before_after,
    clock,
    duration,
    facts_table,
    number,
    print_paths,
    reward_line,
    selected_reward,
    tokens_per_s,
)

_REFRESH_S = 1.0


class Display(Protocol):
    """Where the supervisor reports."""

    def update(self, phase: str, peers: Mapping[str, str]) -> None:
        """Show what is going on, in words, and a word on each process by peer name; cheap when
        nothing changed."""

    def note(self, text: str) -> None:
        """Report an event, once."""

    def close(self) -> None:
        """Leave the terminal clean for what is printed next."""


def make_display(run: RunDir, cfg: Config, console: Console) -> Display:
    """The live panel on a terminal, plain lines anywhere else."""
    return LivePanel(run, cfg, console) if console.is_terminal else PlainLines(run, cfg, console)


class PlainLines:
    """One line per step, phase and event: for log files."""

    def __init__(self, run: RunDir, cfg: Config, console: Console) -> None:
        self._feed = StepFeed(run)
        self._console = console
        self._n_total = cfg.run.steps
        self._printed = {_row_key(row) for row in self._feed.rows}
        self._phase = ""

    def update(self, phase: str, peers: Mapping[str, str]) -> None:
        self._print_new_rows()
        if phase != self._phase:
            self._phase = phase
            if phase != "training":
                self._line(phase)

    def note(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        self._print_new_rows()

    def _print_new_rows(self) -> None:
        if self._feed.poll():
            for row in self._feed.rows:
                if _row_key(row) not in self._printed:
                    self._printed.add(_row_key(row))
                    self._line(self._describe(row))

    def _line(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )

    def _describe(self, row: Row) -> str:
        if "trainer/step_s" not in row:
            values = ", ".join(
                f"{key.removeprefix('eval/')} {number(value)}"
                for key, value in row.items()
                if key.startswith("eval/") and key.rpartition("/")[2] in ("accuracy", "reward")
            )
            return f"evaluated after step {row['step']}: {values}"
        phases = ", ".join(f"{phase} {s:.1f}" for phase, s in _phase_seconds(row).items())
        return (
            f"step {row['step']}/{self._n_total}  reward {number(row.get('reward/mean'))}"
            f"{selected_reward(row)}  "
            f"accuracy {number(row.get('accuracy/train'))}  "
            f"staleness {number(row.get('staleness/mean'), 1)}  "
            f"{row['trainer/step_s']:.1f} s ({phases})  "
            f"tokens/s {number(row.get('generator/tokens_per_s'), 0)} generated, "
            f"{number(row.get('trainer/tokens_per_s'), 0)} trained  "
            f"ETA {self._feed.eta(self._n_total)}"
        )


class LivePanel:
    """A panel that is redrawn in place, at most once a second."""

    def __init__(self, run: RunDir, cfg: Config, console: Console) -> None:
        self._feed = StepFeed(run)
        self._run = run
        self._cfg = cfg
        self._console = console
        self._started = time.monotonic()
        self._drawn = -math.inf
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, phase: str, peers: Mapping[str, str]) -> None:
        now = time.monotonic()
        if now - self._drawn < _REFRESH_S:
            return
        self._drawn = now
        self._feed.poll()
        self._live.update(self.render(phase, peers, now - self._started), refresh=True)

    def note(self, text: str) -> None:
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {text}", style="yellow"))

    def close(self) -> None:
        self._live.stop()

    def render(self, phase: str, peers: Mapping[str, str], elapsed_s: float) -> RenderableType:
        """The panel for the rows read so far."""
        last = self._feed.last
        total = self._cfg.run.steps
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(width=22, no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(
            Text(phase, style="bold"),
            ProgressBar(total=max(total, 1), completed=self._feed.n_steps),
            f"step {self._feed.n_steps}/{total}  ETA {self._feed.eta(total)}",
        )
        parts: list[RenderableType] = [head]
        if last or self._feed.rows:
            parts += [Text(), self._numbers(last), Text()]
        if last:
            parts.append(_phase_bars(last))
        words = "   ".join(f"{peer}: {word}" for peer, word in peers.items())
        parts += [Text(), Text(words, style="dim", overflow="fold")]
        return Panel(
            Group(*parts),
            title=f"{self._run.root.name}  seed {self._cfg.run.seed}",
            title_align="left",
            subtitle=f"{clock(elapsed_s)}  Ctrl-C stops",
            subtitle_align="right",
            border_style="blue",
            # The terminal echoes ^C behind the last line; a wrap there would leave a piece of the
            # panel behind.
            width=self._console.width - 2,
        )

    def _numbers(self, last: Row) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", width=14, no_wrap=True)
        table.add_column()
        if last:
            reward = reward_line(self._feed.rewards, self._console)
            reward.append(f"{selected_reward(last)}  accuracy {number(last.get('accuracy/train'))}")
            table.add_row("reward", reward)
        for name, points in evaluations(self._feed.rows).items():
            table.add_row(name.replace("_", "-"), before_after(points))
        if last:
            table.add_row(
                "tokens/s",
                tokens_per_s(last.get("generator/tokens_per_s"), last.get("trainer/tokens_per_s"))
                + f"   staleness {number(last.get('staleness/mean'), 1)}",
            )
        return table


def show_end(
    run: RunDir,
    summary: Summary,
    console: Console,
    *,
    picture: str | None,
    has_next: bool = True,
) -> None:
    """Print the closing table, where the reward curve is (`picture`), and what to try next."""
    table = facts_table(f"{run.root.name}: {summary['status']}")
    for name, points in summary["eval"].items():
        table.add_row(f"{name.replace('_', '-')} {points['metric']}", before_after(points))
    if summary["reward_last"] is not None:
        table.add_row(
            "training reward",
            f"{number(summary['reward_first'])} → {number(summary['reward_last'])} (means of 5)",
        )
    if summary["selected_reward_last"] not in (None, summary["reward_last"]):
        first, last = summary["selected_reward_first"], summary["selected_reward_last"]
        table.add_row("  of selected groups", f"{number(first)} → {number(last)}")
    table.add_row("steps", f"{summary['steps']}, median {duration(summary['step_s_median'])}")
    for phase, value in summary["phase_s_median"].items():
        if value is not None:
            table.add_row(f"  {PHASE_LABELS[phase]}", duration(value))
    if summary["peak_pss_bytes"]:  # measured where all processes are on one machine
        table.add_row("peak memory", f"{summary['peak_pss_bytes'] / 2**30:.2f} GiB, all processes")
    table.add_row("wall time", clock(summary["wall_s"]))
    console.print()
    console.print(table)
    print_paths(console, {"reward curve": picture, "run directory": str(run.root)})
    console.print()
    if not has_next:
        return
    console.print("Next:", style="bold")
    for what, command in next_commands(run, summary):
        console.print(f"  # {what}", style="dim", highlight=False)
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def next_commands(run: RunDir, summary: Summary) -> list[tuple[str, str]]:
    """What to try after this run: (explanation, shell command)."""
    script = PACKAGE_ROOT / "launch" / "submit.py"  # a job's copy of the package is without it
    words = [sys.executable, str(script)] if script.exists() else ["python", "launch/submit.py"]
    submit = shlex.join(words)
    config = shlex.quote(str(run.root / "config.yaml"))
    seed = summary["seed"] + 1
    resume = f"{submit} --resume {shlex.quote(str(run.root))}"
    if summary["status"] != "done":
        return [("continue this run", resume)]
    if source := summary.get("replay_of"):
        again = f"slurm-grpo replay {shlex.quote(source)} --trainer.optimizer.lr 1e-6"
        return [("the same episodes at another learning rate", again)]
    command = Path(sys.executable).with_name("slurm-grpo")  # there, but seldom on PATH
    report = [str(command) if command.exists() else "slurm-grpo", "report", str(run.root)]
    return [
        ("everything about this run as one HTML page", shlex.join(report)),
        ("train for 20 more steps", f"{resume} --run.steps {summary['steps'] + 20}"),
        (
            "your own questions: JSON lines with `prompt` and `answer`",
            f"{submit} {config} --run.name mine --task.name jsonl --task.path my.jsonl",
        ),
        ("another seed", f"{submit} {config} --run.name {run.root.name}-{seed} --run.seed {seed}"),
    ]


def _phase_bars(row: Row) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", width=20, no_wrap=True)
    table.add_column(justify="right", width=8, no_wrap=True)
    table.add_column(ratio=1)
    total = row["trainer/step_s"]
    table.add_row("a step", duration(total), Text())
    for phase, seconds in _phase_seconds(row).items():
        if phase != "pause":  # it lies inside `sync`
            bar = ProgressBar(total=max(total, 1e-9), completed=seconds)
            table.add_row(PHASE_LABELS[phase], duration(seconds), bar)
    return table


def _phase_seconds(row: Row) -> dict[str, float]:
    return {phase: row[key] for phase, key in PHASES.items() if row.get(key) is not None}


def _row_key(row: Row) -> tuple[int, int, bool]:
    return row["attempt"], row["step"], "trainer/step_s" in row
