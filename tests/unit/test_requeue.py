"""Which end of an attempt brings the job back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_commands import stub
from slurm_grpo.errors import DeadlineExceeded, ExitCode
from slurm_grpo.jobs import requeue
from slurm_grpo.jobs.requeue import Act, next_act, why_told_to_end
from slurm_grpo.run.outcome import Ending, Outcome
from slurm_grpo.slurm.allocation import Allocation, Component

JOB = Allocation(
    job_id="7",
    reference="7",
    restart_count=1,
    components=(Component(job_id="7", hosts=("gen1",), cpus=(6,)),),
)


def act(ending: Ending, code: int = 0, *, checkpoint: bool = False, n_left: int = 1) -> Act:
    outcome = Outcome(ending=ending, exit_code=code, error="why")
    return next_act(outcome, has_new_checkpoint=checkpoint, n_left=n_left)[0]


def test_a_boundary_stop_and_the_time_limit_come_back() -> None:
    assert act(Ending.BOUNDARY, ExitCode.STOPPED, checkpoint=True) is Act.REQUEUE
    assert act(Ending.TIME_LIMIT, 143) is Act.REQUEUE


def test_a_cancelled_run_never_comes_back() -> None:
    assert act(Ending.CANCELLED, 143, checkpoint=True) is Act.FAIL


@pytest.mark.parametrize("ending", [Ending.FINISHED, Ending.SIGNALLED, Ending.REPLACED])
def test_others_just_end(ending: Ending) -> None:
    assert act(ending, checkpoint=True) is Act.END


@pytest.mark.parametrize(
    "code", [ExitCode.FAILURE, ExitCode.CONFIG, ExitCode.NON_FINITE, ExitCode.SCORER]
)
def test_what_another_try_would_meet_again_fails(code: int) -> None:
    assert act(Ending.FAILED, code, checkpoint=True) is Act.FAIL


def test_an_infrastructure_failure_comes_back_if_the_attempt_got_anywhere() -> None:
    assert act(Ending.FAILED, ExitCode.INFRASTRUCTURE, checkpoint=True) is Act.REQUEUE
    assert act(Ending.FAILED, ExitCode.INFRASTRUCTURE) is Act.FAIL


@pytest.mark.parametrize("ending", [Ending.BOUNDARY, Ending.TIME_LIMIT])
def test_requeues_are_bounded(ending: Ending) -> None:
    assert act(ending, n_left=0) is Act.FAIL


def test_without_an_answer_no_step_of_an_earlier_life_is_taken_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(requeue, "LEFTOVERS_S", 0.2)
    monkeypatch.setattr(requeue, "_POLL_S", 0.05)
    with pytest.raises(DeadlineExceeded, match=r"job 7: it is not known .*squeue: no such command"):
        requeue.end_leftover_steps(JOB)


def test_a_replaced_life_waits_on_while_slurm_does_not_answer_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(requeue, "SUCCESSOR_S", 0.3)
    monkeypatch.setattr(requeue, "_SUCCESSOR_POLL_S", 0.05)
    started = time.monotonic()
    requeue.wait_for_successor(JOB)
    assert 0.3 <= time.monotonic() - started < 60


@pytest.mark.parametrize("row", ["", "7|7|RUNNING|gen1|None|9:58|0:02|N/A|/s/a.sh"])
def test_a_sites_notice_is_no_reason_to_end_a_run_whose_engine_died(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "squeue", f"echo '** Maintenance **'; echo '{row}'")
    stub(tmp_path, "scontrol", "echo '** Maintenance **'; echo 'JobId=7 PreemptTime=None'")
    monkeypatch.setenv("PATH", str(tmp_path))
    ending, why = why_told_to_end(JOB)
    assert ending is Ending.SIGNALLED
    assert ("Slurm cannot be asked" in why) == (not row)
