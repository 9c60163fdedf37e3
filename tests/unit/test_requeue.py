"""Which end of an attempt brings the job back."""

from __future__ import annotations

import pytest

from slurm_grpo.errors import ExitCode
from slurm_grpo.outcome import Ending, Outcome
from slurm_grpo.slurm.requeue import Act, next_act


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
