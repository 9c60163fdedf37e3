"""The summary is what the files of all attempts say."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from slurm_grpo.config.schema import Config, ModelConfig, RunConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.run import attempt
from slurm_grpo.run.attempt import AttemptRecord, RunLock, take_attempt
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.run.summary import write_summary
from slurm_grpo.run.versions import code_version, installed_versions

CONFIG = Config(model=ModelConfig(path="m"), run=RunConfig(seed=7, steps=4))


def log_steps(run: RunDir, attempt: int, steps: range, step_s: float) -> None:
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=attempt)
    for step in steps:
        values = {
            "trainer/step_s": step_s + step,
            "trainer/wait_for_groups_s": 2.0 * step,
            "trainer/sync_s": 0.5,
            "reward/mean": step / 10,
        }
        writer.log(step, values)
    writer.close()


def begin(run: RunDir, resumed_from: int) -> int:
    number = take_attempt(run)
    run.attempt(number).resumed_from.write_text(f"{resumed_from}\n")
    return number


def evaluate(run: RunDir, attempt: int, step: int, accuracy: float) -> None:
    writer = MetricsWriter(run.metrics_file("trainer"), attempt=attempt)
    writer.log(step, {"eval/held_out/accuracy": accuracy, "eval/held_out/reward": 0.1})
    writer.close()


def test_summary_of_a_resumed_run_counts_valid_steps_and_all_the_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    first = begin(run, 0)
    evaluate(run, first, 0, 0.25)
    log_steps(run, first, range(1, 4), step_s=100.0)
    record = AttemptRecord(run.attempt(first))
    record.renew(peak_pss_bytes=900)  # killed: never a final status
    second = begin(run, 1)
    log_steps(run, second, range(2, 5), step_s=0.0)
    evaluate(run, second, 4, 0.75)
    AttemptRecord(run.attempt(second)).renew(peak_pss_bytes=500, status="done")
    run.attempt(second).versions.write_text('{"torch": "2"}')

    written = write_summary(run, CONFIG, status="done")
    assert json.loads(run.summary.read_text()) == written
    assert written["status"] == "done"
    assert written["seed"] == 7
    assert written["steps"] == 4
    expected = {"metric": "accuracy", "before": 0.25, "after": 0.75}
    assert written["eval"] == {"held_out": expected}
    assert written["step_s_median"] == 3.5  # of 101, 2, 3, 4
    assert written["phase_s_median"] == {
        "wait": 5.0,
        "read": None,
        "forward_backward": None,
        "optimizer": None,
        "sync": 0.5,
        "pause": None,
    }
    assert written["peak_pss_bytes"] == 900
    assert written["n_attempts"] == 2
    assert 0 <= written["wall_s"] < 5
    assert written["versions"] == {"torch": "2"}


def test_a_run_that_failed_before_its_first_step_has_a_summary_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    take_attempt(run)
    written = write_summary(run, CONFIG, status="failed", error="engine-0 ended")
    assert (written["status"], written["error"], written["steps"]) == (
        "failed",
        "engine-0 ended",
        0,
    )
    assert written["eval"] == {}
    assert written["step_s_median"] is None


def test_attempts_are_numbered_upwards_and_never_shared(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    assert [take_attempt(run) for _ in range(3)] == [0, 1, 2]


def test_a_second_live_supervisor_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = RunLock(run)
    lock.acquire()
    holder = json.loads((tmp_path / "supervisor.lock").read_text())
    with pytest.raises(ConfigError, match=rf"host {holder['host']}, pid {holder['pid']}\)"):
        RunLock(run).acquire()
    lock.release()
    again = RunLock(run)
    again.acquire()
    again.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"pid": 2**22 + 1}])
def test_the_lock_of_a_dead_supervisor_is_taken_over(
    tmp_path: Path, change: dict[str, int]
) -> None:
    run = RunDir(tmp_path)
    RunLock(run).acquire()
    path = tmp_path / "supervisor.lock"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    RunLock(run).acquire()
    assert json.loads(path.read_text()).items() >= {"pid": os.getpid()}.items()
    assert [p.name for p in tmp_path.iterdir()] == ["supervisor.lock"]


@pytest.mark.parametrize("renews", [True, False])
def test_a_holder_on_another_host_lives_while_it_renews_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renews: bool
) -> None:
    monkeypatch.setattr(attempt, "_FOREIGN_WATCH_S", 1.5)
    path = tmp_path / "supervisor.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start_ticks": 1}))
    if renews:
        timer = threading.Timer(0.3, os.utime, (path,))
        timer.start()
        with pytest.raises(ConfigError, match="host elsewhere, pid 1"):
            RunLock(RunDir(tmp_path)).acquire()
        timer.join()
    else:
        RunLock(RunDir(tmp_path)).acquire()
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_versions_name_the_interpreter_and_the_code() -> None:
    versions = installed_versions()
    assert versions["slurm_grpo"] == code_version()
    assert {"python", "numpy", "h5py"} <= versions.keys()
