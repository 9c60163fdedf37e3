"""How a run stands, judged from files that the product's own writers made, and Slurm's words."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import ConfigError
from slurm_grpo.run import proctree
from slurm_grpo.run.attempt import AttemptRecord, RunLock
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.run.state import (
    ARRAY_SCRIPT,
    MANIFEST,
    SILENCE_S,
    element_number,
    find_run,
    is_of,
    judge,
    live_supervisor_here,
    stand,
    submitted_jobs,
    tally,
)
from slurm_grpo.run.summary import read_json, write_summary
from slurm_grpo.slurm.queue import ComponentState


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.create()
    return run


def begin(run: RunDir, number: int = 0, *, status: str = "running", age_s: float = 0.0) -> None:
    """An attempt whose supervisor last wrote `age_s` ago."""
    attempt = run.attempt(number)
    attempt.root.mkdir(parents=True)
    AttemptRecord(attempt).renew(peak_pss_bytes=0, status=status)
    then = time.time() - age_s
    os.utime(attempt.record, (then, then))


def job(state: str, *, component: int = 0, reason: str = "None") -> ComponentState:
    return ComponentState(job_id="7", component=component, state=state, reason=reason)


def word_and_detail(run: RunDir, *components: ComponentState) -> tuple[str, str]:
    standing = judge(run, components)
    assert standing.is_alive == (standing.word in ("queued", "starting", "running", "ending"))
    return standing.word, standing.detail


def test_a_heartbeat_is_enough_to_be_running(run: RunDir) -> None:
    begin(run)
    assert word_and_detail(run) == ("running", "")


def test_silence_without_a_job_is_death_and_exit_files_are_named(run: RunDir) -> None:
    begin(run, age_s=600)
    run.attempt(0).exit_code("trainer-0").write_text("5\n")
    word, detail = word_and_detail(run)
    assert word == "died"
    assert detail == "no sign of life for 10 min; trainer-0 exit code 5"


def test_silence_of_a_supervisor_that_lives_on_this_host_is_not_death(run: RunDir) -> None:
    begin(run, age_s=600)
    lock = RunLock(run)
    lock.acquire()
    assert live_supervisor_here(run) == os.getpid()
    assert word_and_detail(run) == ("running", "no sign of life for 10 min")
    lock.release()
    assert live_supervisor_here(run) is None


def test_a_lock_left_by_another_process_of_the_same_pid_names_nobody(run: RunDir) -> None:
    ticks = proctree.start_ticks(os.getpid())
    assert ticks is not None
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": ticks - 1}
    (run.root / "supervisor.lock").write_text(json.dumps(holder))
    assert live_supervisor_here(run) is None


def test_the_last_attempts_own_word_wins_over_everything_but_a_living_job(run: RunDir) -> None:
    begin(run, 0, status="failed")
    begin(run, 1, status="done")
    assert word_and_detail(run) == ("done", "")
    assert word_and_detail(run, job("FAILED")) == ("done", "")
    assert word_and_detail(run, job("PENDING", reason="BeginTime")) == (
        "queued",
        "to continue, BeginTime",
    )


def test_a_failure_comes_with_its_error(run: RunDir) -> None:
    begin(run, status="failed")
    write_summary(run, Config(), status="failed", error="trainer-0 ended: exit code 3")
    assert word_and_detail(run) == ("failed", "trainer-0 ended: exit code 3")


def test_a_cancelled_run_is_called_so_once_slurm_has_forgotten_it(run: RunDir) -> None:
    begin(run, status="interrupted")
    assert word_and_detail(run) == ("interrupted", "")
    path = run.attempt(0).record
    path.write_text(json.dumps(read_json(path) | {"ending": Ending.CANCELLED.value}))
    assert word_and_detail(run) == ("cancelled", "")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED", ("cancelled", "before it began; Slurm: CANCELLED")),
        ("FAILED", ("failed", "before it began; Slurm: FAILED")),
        ("PENDING", ("queued", "")),
        ("RUNNING", ("starting", "")),
        ("COMPLETING", ("ending", "")),
    ],
)
def test_before_the_first_attempt_slurm_has_the_word(
    state: str, expected: tuple[str, str], run: RunDir
) -> None:
    assert word_and_detail(run, job(state), job(state, component=1)) == expected


def test_a_node_failure_is_named_with_the_silence(run: RunDir) -> None:
    begin(run, age_s=300)
    assert word_and_detail(run, job("NODE_FAIL")) == (
        "died",
        "no sign of life for 5 min; Slurm: NODE_FAIL",
    )


def test_a_running_job_whose_supervisor_is_silent_is_running_with_a_doubt(run: RunDir) -> None:
    begin(run, age_s=SILENCE_S + 100)
    assert word_and_detail(run, job("RUNNING")) == ("running", "no sign of life for 3 min")


def test_a_requeued_job_that_runs_again_is_starting_until_its_attempt_begins(run: RunDir) -> None:
    begin(run, status="stopped")
    assert word_and_detail(run, job("RUNNING")) == ("starting", "")


def test_a_submitted_run_that_slurm_has_forgotten_has_not_started(run: RunDir) -> None:
    (run.root / "jobs/0").mkdir(parents=True)
    (run.root / "jobs/0/job_id").write_text("41\n")
    (run.root / "jobs/41").symlink_to("0")
    assert submitted_jobs(run) == ["41"]
    assert word_and_detail(run) == ("not started", "Slurm has forgotten job 41")


def test_without_slurm_files_decide_where_they_can(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(run.root))
    assert stand(run).word == "not started"  # was never submitted
    (run.root / "jobs/0").mkdir(parents=True)
    (run.root / "jobs/0/job_id").write_text("41\n")
    standing = stand(run)
    assert standing.word == "unknown"
    assert "squeue: no such command here" in standing.detail
    begin(run, status="done")
    assert stand(run).word == "done"


def test_jobs_to_cancel_are_the_living_and_elements_of_an_array_by_their_number(
    run: RunDir,
) -> None:
    element = ComponentState(job_id="8", own_id="11", task=3, state="RUNNING")
    assert judge(run, [job("RUNNING"), job("RUNNING", component=1)]).job_ids == ["7"]
    assert judge(run, [element]).job_ids == ["8_3"]
    assert judge(run, [job("COMPLETED")]).job_ids == []


def test_another_jobs_script_under_a_reused_id_is_not_the_runs(run: RunDir) -> None:
    mine = ComponentState(job_id="7", state="RUNNING", script=str(run.root / "jobs/0/batch.sh"))
    array = ComponentState(job_id="7", state="RUNNING", script=str(run.root.parent / ARRAY_SCRIPT))
    foreign = ComponentState(job_id="7", state="RUNNING", script="/home/else/job.sh")
    remembered = ComponentState(job_id="7", state="COMPLETED")  # sacct tells no script
    assert [is_of(c, run) for c in (mine, array, foreign, remembered)] == [True, True, False, True]


def test_an_element_of_a_sweep_knows_its_place(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "s/s-002")
    run.create()
    assert element_number(run) is None
    elements = [{"index": 2, "run_dir": "/elsewhere/s/s-002", "changes": {}}]
    (tmp_path / "s" / MANIFEST).write_text(json.dumps({"elements": elements}))
    (tmp_path / "s" / ARRAY_SCRIPT).touch()
    assert element_number(run) == 2


def test_a_run_is_found_by_directory_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="There is no run under runs/ either"):
        find_run("mine")
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").touch()
    assert find_run("mine") == find_run("runs/mine") == RunDir(tmp_path / "runs/mine")
    with pytest.raises(ConfigError, match="Did you mean runs/mine"):
        find_run("mone")


def test_a_tally_counts_words(run: RunDir) -> None:
    begin(run)
    assert tally([judge(run, []), judge(run, []), judge(run, [job("PENDING")])]) == (
        "2 running, 1 queued"
    )
