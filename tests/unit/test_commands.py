"""What `slurm-grpo status|logs|cancel|resume` print and do, on run directories without a job."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import ROOT, wait_until
from slurm_grpo.commands.main import main
from slurm_grpo.config.loading import freeze_config, read_frozen
from slurm_grpo.config.schema import ClusterConfig, Config, RunConfig
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.attempt import AttemptRecord
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.slurm.queue import ComponentState

HELD_OUT = {"eval/held_out/accuracy": 0.25}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of 40 steps in its second attempt, after twelve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    run = RunDir(tmp_path / "runs/r")
    run.create()
    freeze_config(Config(run=RunConfig(name="r", seed=3, steps=40)), run.config)
    for attempt, (first, last) in enumerate([(1, 8), (9, 12)]):
        folder = run.attempt(attempt)
        folder.root.mkdir()
        folder.resumed_from.write_text(f"{first - 1}\n")
        write_metrics(run, attempt, first, last)
        folder.log("supervisor").write_text(f"supervisor of attempt {attempt}\n")
        folder.log("trainer-1").write_text("".join(f"line {i}\n" for i in range(200)))
    AttemptRecord(run.attempt(0)).renew(peak_pss_bytes=0, status="stopped")
    AttemptRecord(run.attempt(1)).renew(peak_pss_bytes=0)
    return run


def write_metrics(run: RunDir, attempt: int, first: int, last: int) -> None:
    metrics = MetricsWriter(run.metrics_file("trainer"), attempt=attempt)
    if first == 1:
        metrics.log(0, HELD_OUT)
    for step in range(first, last + 1):
        row = {
            "trainer/step_s": 2.0,
            "reward/mean": step / 20,
            "staleness/mean": 0.5,
            "generator/tokens_per_s": 123.4,
            "trainer/tokens_per_s": 567.8,
        }
        metrics.log(step, row)
    metrics.close()


def end(run: RunDir, attempt: int, status: str) -> None:
    AttemptRecord(run.attempt(attempt)).renew(peak_pss_bytes=0, status=status)


def test_status_shows_progress_on_80_columns(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run.attempt(1).log("supervisor")
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for level, text in (
        (logging.INFO, "started engine-0, incarnation 0, pid 1"),
        (logging.WARNING, "engine-0 ended (killed by SIGKILL); restart 1 of 3 in 1 s"),
        (logging.INFO, "started engine-0, incarnation 1, pid 2"),
    ):
        handler.emit(logging.LogRecord("s", level, "", 0, text, (), None))
    handler.close()
    assert main(["status", "r"]) == ExitCode.OK
    text = capsys.readouterr().out
    shown = dict(re.findall(r"^ (\S+(?: \S+)*?)  +(.+?) *$", text, re.MULTILINE))
    assert text.startswith("r: running")
    assert shown["attempt"].startswith("1 on ")
    assert "1 engine restart" in shown["attempt"]
    assert shown["step"].startswith("12/40   ETA 0:56, about ")
    assert shown["policy version"] == "12   checkpoint none"
    assert re.fullmatch(r"0\.600 ▁\S+█  \+0\.250 lately", shown["reward"])
    assert shown["held-out accuracy"] == "0.250 before training"
    assert shown["staleness"] == "0.5"
    assert shown["tokens/s"] == "123 generated   568 trained   2.0 s a step"
    assert "engine-0 ended (killed by SIGKILL)" in shown["last warnings"]
    assert shown["logs"] == str(run.attempt(1).root)
    assert all(len(line) <= 80 for line in text.splitlines() if str(run.root) not in line)


def test_status_as_json_has_the_same_for_programs(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.time()
    assert main(["status", str(run.root), "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    wanted = {"state": "running", "attempt": 1, "n_attempts": 2, "step": 12, "steps": 40}
    assert wanted.items() <= report.items()
    assert report["job"] is None
    assert report["remaining_s"] == pytest.approx(56.0)
    assert before + 55 < report["ends_unix"] < time.time() + 57


def test_status_of_a_run_before_its_first_step_has_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "new")
    run.create()
    freeze_config(Config(), run.config)
    assert main(["status", str(run.root)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert text.startswith("new: not started")
    assert "none yet" in text
    assert "reward" not in text


def test_both_components_of_a_job_are_shown(run: RunDir) -> None:
    from slurm_grpo.commands.status import build_report
    from slurm_grpo.run.state import judge

    parts = [
        ComponentState(job_id="7", component=k, state="RUNNING", nodes=n, left="1:00", elapsed="9")
        for k, n in enumerate(("gen[1-2]", "train1"))
    ]
    cfg = Config(cluster=ClusterConfig(kind="slurm"))
    job = build_report(run, cfg, judge(run, parts))["job"]
    assert job["id"] == "7"
    assert [(c["name"], c["nodes"]) for c in job["components"]] == [
        ("generators", "gen[1-2]"),
        ("trainers", "train1"),
    ]


def test_logs_shows_the_last_lines_of_the_last_attempt(
    run: RunDir, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["logs", "r"]) == ExitCode.OK
    assert capfdbinary.readouterr().out == b"supervisor of attempt 1\n"
    assert main(["logs", "r", "--attempt", "0"]) == ExitCode.OK
    assert capfdbinary.readouterr().out == b"supervisor of attempt 0\n"
    assert main(["logs", "r", "--role", "trainer", "--rank", "1", "-n", "2"]) == ExitCode.OK
    assert capfdbinary.readouterr().out == b"line 198\nline 199\n"


def test_logs_of_a_role_that_never_began_are_its_sruns(
    run: RunDir, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run.attempt(1).log("srun-trainers").write_text("srun: error: no such node\n")
    assert main(["logs", "r", "--role", "trainer", "--rank", "0"]) == ExitCode.OK
    assert capfdbinary.readouterr().out == b"srun: error: no such node\n"
    assert main(["logs", "r", "--role", "trainer", "--rank", "1", "-n", "1"]) == ExitCode.OK
    assert capfdbinary.readouterr().out == b"line 199\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--role", "trainer"], "no such log. Attempt 1 has supervisor, trainer-1."),
        (["--attempt", "7"], "there is no attempt 7 in"),
    ],
)
def test_a_log_that_is_not_there_is_answered_with_those_that_are(
    arguments: list[str], expected: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "r", *arguments]) == ExitCode.CONFIG
    assert expected in capsys.readouterr().err


def test_logs_follows_into_the_next_attempt_and_ends_with_the_run(run: RunDir) -> None:
    shown = run.root / "shown.txt"
    program = "import sys; from slurm_grpo.commands.main import main; sys.exit(main())"
    with shown.open("wb") as out:
        follower = subprocess.Popen(
            [sys.executable, "-c", program, "logs", str(run.root), "--follow"],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    try:
        wait_until(shown.read_bytes, 120, "the first lines")
        with run.attempt(1).log("supervisor").open("a") as log:
            log.write("more of attempt 1\n")
        folder = run.attempt(2)
        folder.root.mkdir()
        end(run, 1, "stopped")
        AttemptRecord(folder).renew(peak_pss_bytes=0)
        folder.log("supervisor").write_text("whole of attempt 2\n")
        wait_until(lambda: b"whole of" in shown.read_bytes(), 120, "the next attempt")
        end(run, 2, "done")
        assert follower.wait(120) == ExitCode.OK
    finally:
        follower.kill()
        follower.wait()
    assert shown.read_text().splitlines() == [
        "supervisor of attempt 1",
        "more of attempt 1",
        "==> r: attempt 2 <==",
        "whole of attempt 2",
        "==> r: done <==",
    ]


def test_cancel_of_a_run_that_has_ended_says_so(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, 1, "done")
    assert main(["cancel", "r"]) == ExitCode.OK
    assert capsys.readouterr().out == f"{run.root}: done; nothing to cancel.\n"


def test_cancel_of_a_run_on_another_host_says_where(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run.attempt(1).root / "supervisor.json"
    record.write_text(json.dumps({"host": "far", "pid": 5, "status": "running", "started_unix": 0}))
    assert main(["cancel", "r"]) == ExitCode.CONFIG
    assert "runs on far, which cannot be reached from here" in capsys.readouterr().err


def test_resume_passes_options_on_and_explains_as_submit_does(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", "r", "--run.seed", "4"]) == ExitCode.CONFIG
    assert "--run.seed: a resumed run keeps its configuration" in capsys.readouterr().err
    assert read_frozen(run.config).run.seed == 3
