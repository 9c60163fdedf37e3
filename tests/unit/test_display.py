"""What a person sees: the panel, the lines of a log, the closing table, the reward curve."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from slurm_grpo.config.schema import Config, ModelConfig, RunConfig
from slurm_grpo.run.attempt import take_attempt
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.run.plots import plot_reward
from slurm_grpo.run.step_feed import StepFeed
from slurm_grpo.run.summary import build_summary
from slurm_grpo.run.words import sparkline
from slurm_grpo.supervisor.display import LivePanel, PlainLines, make_display, show_end

CONFIG = Config(model=ModelConfig(path="m"), run=RunConfig(steps=40, seed=2))
STATE = ("training", {"engine-0": "version 12", "engine-1": "starting"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "quick")
    take_attempt(run)
    run.attempt(0).resumed_from.write_text("0\n")
    return run


def log_steps(run: RunDir, steps: range) -> None:
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    for step in steps:
        if step == 0:
            writer.log(0, {"eval/held_out/accuracy": 0.3})
            continue
        values = {
            "trainer/step_s": 6.0,
            "trainer/wait_for_groups_s": 2.0,
            "trainer/read_s": 0.004,
            "trainer/forward_backward_s": 3.0,
            "trainer/optimizer_s": 0.25,
            "trainer/sync_s": 0.6,
            "reward/mean": step / 40,
            "selected/reward_mean": 0.5,
            "accuracy/train": 0.5,
            "staleness/mean": 0.0,
            "generator/tokens_per_s": 330.0,
            "trainer/tokens_per_s": 480.0,
        }
        writer.log(step, values)
    writer.close()


def console(width: int, *, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system=None,
        legacy_windows=False,
    )


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_fits_the_terminal_and_says_where_the_run_stands(run: RunDir, width: int) -> None:
    log_steps(run, range(13))
    panel = LivePanel(run, CONFIG, console(width, terminal=True))
    panel.close()
    target = console(width)
    target.print(panel.render(*STATE, elapsed_s=75.0))
    text = printed(target)
    assert max(map(len, text.splitlines())) == width - 2
    for piece in (
        "step 12/40  ETA 2:48",
        "held-out        0.300 before training",
        "reward          0.300 ▁",
        "330 generated",
        "480 trained",
        "staleness 0.0",
        "waiting for episodes     2.0 s",
        "engine-0: version 12",
        "1:15",
    ):
        assert piece in text


def test_the_panel_can_be_drawn_before_anything_happened(run: RunDir) -> None:
    panel = LivePanel(run, CONFIG, console(80, terminal=True))
    panel.close()
    target = console(80)
    target.print(panel.render("starting processes", {}, elapsed_s=0.0))
    assert "step 0/40  ETA -" in printed(target)


def test_a_log_file_gets_one_line_per_step_however_fast_they_come(run: RunDir) -> None:
    target = console(200)
    display = make_display(run, CONFIG, target)
    assert isinstance(display, PlainLines)
    display.update("first weights", {})
    log_steps(run, range(4))
    display.update(*STATE)
    display.update(*STATE)
    display.note("engine-1 ended")
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in printed(target).splitlines()]
    assert lines[:2] == ["first weights", "evaluated after step 0: held_out/accuracy 0.300"]
    assert lines[2].startswith(
        "step 1/40  reward 0.025 (selected 0.500)  accuracy 0.500  staleness 0.0  6.0 s (wait 2.0,"
    )
    assert [line.split()[1] for line in lines[2:5]] == ["1/40", "2/40", "3/40"]
    assert lines[5:] == ["engine-1 ended"]


def test_steps_of_an_earlier_attempt_are_not_printed_again(run: RunDir) -> None:
    log_steps(run, range(4))
    target = console(200)
    display = make_display(run, CONFIG, target)
    display.update(*STATE)
    assert printed(target) == ""


def test_the_feed_waits_for_whole_lines(run: RunDir) -> None:
    log_steps(run, range(1, 3))
    path = run.metrics_file("trainer")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    feed = StepFeed(run)
    assert [row["step"] for row in feed.rows] == [1]
    with path.open("ab") as file:
        file.write(whole[-5:])
    assert feed.poll()
    assert [row["step"] for row in feed.rows] == [1, 2]
    assert not feed.poll()


def test_the_end_shows_results_and_the_next_commands(run: RunDir) -> None:
    log_steps(run, range(41))
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    writer.log(40, {"eval/held_out/accuracy": 0.75})
    writer.close()
    target = console(100)
    summary = build_summary(run, CONFIG, status="done") | {"peak_pss_bytes": 5 * 2**30}
    show_end(run, summary, target, picture="/somewhere/reward.png")
    text = printed(target)
    for piece in (
        "quick: done",
        "held-out accuracy",
        "0.300 → 0.750",
        "of selected groups",
        "0.500 → 0.500",
        "5.00 GiB",
        "/somewhere/reward.png",
        f"--resume {run.root} --run.steps 60",
        "--task.name jsonl --task.path my.jsonl",
        "--run.name quick-3 --run.seed 3",
    ):
        assert piece in text


def test_a_run_cut_short_is_resumed_without_more_steps(run: RunDir) -> None:
    target = console(100)
    show_end(run, build_summary(run, CONFIG, status="interrupted"), target, picture=None)
    assert f"--resume {run.root}\n" in printed(target)
    assert "reward curve" not in printed(target)


def test_a_job_that_may_come_back_by_itself_asks_nobody_to_resume_it(run: RunDir) -> None:
    target = console(100)
    summary = build_summary(run, CONFIG, status="stopped")
    show_end(run, summary, target, picture=None, has_next=False)
    assert "quick: stopped" in printed(target)
    assert "Next" not in printed(target)


@pytest.mark.parametrize("steps", [range(0), range(1), range(2), range(41)], ids=len)
def test_a_reward_curve_can_be_drawn_from_any_number_of_steps(run: RunDir, steps: range) -> None:
    log_steps(run, steps)
    plot_reward(run, run.root / "reward.png")
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_sparkline_goes_from_lowest_to_highest_in_the_width_it_has() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40
