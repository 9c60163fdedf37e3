"""Metrics files: whole rows across kills and resumes, and the wandb copy with the real library."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slurm_grpo.run import proctree
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter, read_metrics, read_run_metrics, valid_rows

ROOT = Path(__file__).resolve().parents[2]


def test_rows_come_back_as_they_were_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m" / "trainer.jsonl", attempt=3)
    before = time.time()
    writer.log(1, {"loss": 0.5, "text": "a", "n": np.int64(4), "x": np.float32(0.25)})
    (row,) = read_metrics(tmp_path / "m" / "trainer.jsonl")  # on disk before close
    writer.close()
    assert before - 1 < row.pop("time_unix") < time.time() + 1
    assert row == {"step": 1, "attempt": 3, "loss": 0.5, "text": "a", "n": 4, "x": 0.25}


def test_non_finite_values_become_null_and_the_file_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = MetricsWriter(path, attempt=0)
    writer.log(1, {"a": math.nan, "b": np.float32("inf"), "c": None})
    writer.close()
    row = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (row["a"], row["b"], row["c"]) == (None, None, None)


def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first = MetricsWriter(path, attempt=0)
    first.log(1, {"a": 1})
    first.log(2, {"a": 2})
    first.close()
    path.write_bytes(path.read_bytes()[:-7])
    assert [row["step"] for row in read_metrics(path)] == [1]
    second = MetricsWriter(path, attempt=1)
    second.log(2, {"a": 3})
    second.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1), (2, 3)]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_only_steps_no_later_attempt_went_back_over_are_valid() -> None:
    rows = [{"attempt": 0, "step": s} for s in range(16)]
    rows += [{"attempt": 1, "step": s} for s in range(11, 13)]
    rows += [{"attempt": 2, "step": s} for s in range(6, 9)]
    valid = valid_rows(rows, {0: 0, 1: 10, 2: 5})
    assert [(r["attempt"], r["step"]) for r in valid] == [
        *((0, s) for s in range(6)),
        *((2, s) for s in range(6, 9)),
    ]


def test_an_attempt_that_never_started_invalidates_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    for step in (1, 2, 3):
        writer.log(step, {})
    writer.close()
    for attempt in (0, 1):
        run.attempt(attempt).root.mkdir()
    run.attempt(0).resumed_from.write_text("0\n")
    assert [row["step"] for row in read_run_metrics(run, "trainer")] == [1, 2, 3]
    run.attempt(1).resumed_from.write_text("2\n")
    assert [row["step"] for row in read_run_metrics(run, "trainer")] == [1, 2]


WANDB_ROLE = """
import sys, time
from pathlib import Path
from slurm_grpo.config.schema import Config, ModelConfig, WandbConfig
from slurm_grpo.run.metrics import WandbLogger
from slurm_grpo.run.directory import RunDir
cfg = Config(model=ModelConfig(path="m"), wandb=WandbConfig(enabled=True))
logger = WandbLogger(cfg, RunDir(Path(sys.argv[1])), int(sys.argv[2]))
for step in (3, 4, 2):
    logger.log(step, {"loss": 1.0 / step, "bad": float("nan")})
print("logged", flush=True)
if sys.argv[3] == "hang":
    time.sleep(100)
logger.close()
"""


def wandb_role(root: Path, attempt: int, end: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-c", WANDB_ROLE, str(root), str(attempt), end],
        env=env | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_wandb_writes_offline_into_the_run_and_keeps_its_id(tmp_path: Path) -> None:
    for attempt in (0, 1):
        output, _ = wandb_role(tmp_path, attempt, "close").communicate(timeout=120)
        assert output == "logged\n"
    run = RunDir(tmp_path)
    run_id = (run.wandb / "run_id").read_text()
    files = sorted(run.wandb.glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    assert all(path.stat().st_size > 500 for path in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wandb"]


def test_a_killed_role_leaves_no_wandb_process(tmp_path: Path) -> None:
    process = wandb_role(tmp_path, 0, "hang")
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    children = proctree.descendants(process.pid) - {process.pid}
    assert children, "wandb runs a service process"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in children if proctree.start_ticks(pid) is not None]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.05)
