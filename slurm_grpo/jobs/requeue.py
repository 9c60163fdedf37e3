"""Whether a job comes back after an attempt, and what Slurm is asked and told for that.

The table is `next_act`, pure. The rest asks squeue and scontrol about this job: why it was told to
end, whether an earlier life left steps behind; and puts it back into the queue. Called a few times
in a job's life, never periodically.
"""

from __future__ import annotations

import logging
import re
import time
from enum import Enum

from slurm_grpo.errors import DeadlineExceeded, ExitCode, SlurmUnavailable
from slurm_grpo.run.outcome import Ending, Outcome
from slurm_grpo.slurm.allocation import Allocation
from slurm_grpo.slurm.queue import job_states, run_slurm

log = logging.getLogger(__name__)

LEFTOVERS_S = 300.0
"""Longest wait for the end of an earlier life's steps."""
SUCCESSOR_S = 7 * 24 * 3600.0
"""Longest wait of a replaced life for the next one, which needs nodes first."""
_POLL_S = 2.0
_SUCCESSOR_POLL_S = 30.0
_IN_QUEUE = ("PENDING", "REQUEUED")


class Act(Enum):
    """What a job does after an attempt."""

    END = "end"
    FAIL = "fail"
    REQUEUE = "requeue"


def next_act(outcome: Outcome, *, has_new_checkpoint: bool, n_left: int) -> tuple[Act, str]:
    """What follows from how an attempt ended, and why, in a sentence.

    `has_new_checkpoint`: one was completed since the attempt began. `n_left`: requeues that
    cluster.max_requeues still allows.
    """
    match outcome.ending:
        case Ending.FINISHED:
            return Act.END, "the run is finished"
        case Ending.SIGNALLED | Ending.REPLACED:
            return Act.END, outcome.error or outcome.ending.value
        case Ending.CANCELLED:
            return Act.FAIL, "Slurm has ended the job, and brings it back or not"
        case Ending.FAILED if outcome.exit_code != ExitCode.INFRASTRUCTURE:
            return Act.FAIL, "another attempt would fail in the same way"
        case Ending.FAILED if not has_new_checkpoint:
            return Act.FAIL, "no checkpoint was completed in this attempt, so another may not help"
    if n_left <= 0:
        return Act.FAIL, "it has been requeued cluster.max_requeues times"
    return Act.REQUEUE, f"{outcome.ending.value}; continuing from the last checkpoint"


def why_told_to_end(allocation: Allocation) -> tuple[Ending, str]:
    """What SIGTERM, or the end of steps, means by Slurm's account, and a sentence on it.

    BOUNDARY: preempted, with time left. REPLACED: requeued, since this node seems lost. SIGNALLED
    when Slurm knows of no reason, or does not answer: a cancelled job must not come back by
    mistake.
    """
    try:
        states = job_states([allocation.reference])[allocation.reference]
    except SlurmUnavailable as error:
        return Ending.SIGNALLED, f"told to end, and Slurm does not say why: {error}"
    words = ", ".join(f"component {s.component} {s.state}, reason {s.reason}" for s in states)
    if any(s.reason == "TimeLimit" or s.state == "TIMEOUT" for s in states):
        return Ending.TIME_LIMIT, f"the time limit is reached ({words})"
    if states[0].state in _IN_QUEUE:
        return Ending.REPLACED, f"Slurm takes this node for lost and has requeued the job ({words})"
    if all(s.state == "RUNNING" for s in states):
        if _is_preempted(allocation):
            return Ending.BOUNDARY, "Slurm wants the nodes for another job"
        return Ending.SIGNALLED, f"told to end by a person ({words})"
    return Ending.CANCELLED, f"Slurm is ending the job ({words})"


def _is_preempted(allocation: Allocation) -> bool:
    shown = _ask("scontrol", "show", "job", "-o", allocation.reference)
    times = re.findall(r"\bPreemptTime=(\S+)", shown)
    return any(time != "None" for time in times)


def end_leftover_steps(allocation: Allocation) -> None:
    """End the steps that an earlier life of this job left on its components, and see them gone.

    The loss of the leader's node restarts the leader alone: the tasks of component 1 go on, and the
    next srun there would hang. Raises DeadlineExceeded.
    """
    deadline = time.monotonic() + LEFTOVERS_S
    while True:
        try:
            left = _leftover_steps(allocation)
            if not left:
                return
            log.warning("ending steps that an earlier life of this job left: %s", ", ".join(left))
            what = f"steps {', '.join(left)} of an earlier life do not end"
        except SlurmUnavailable as error:  # none must not be taken for granted
            left, what = [], f"it is not known which steps an earlier life left ({error})"
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"job {allocation.reference}: {what} within {LEFTOVERS_S:.0f} s. Look at their "
                f"nodes: `squeue -s -j {allocation.job_id} -o '%i %N'`; then resume the run."
            )
        if left:
            _ask("scancel", "--signal=KILL", *left)
            _ask("scancel", *left)  # a step that has no task to signal
        time.sleep(_POLL_S)


def _leftover_steps(allocation: Allocation) -> list[str]:
    ids = ",".join(component.job_id for component in allocation.components)
    # Numbered ones: not J.batch, J.extern.
    return re.findall(r"^\d+\.\d+$", run_slurm(("squeue", "-h", "-s", "-j", ids, "-o", "%i")), re.M)


def wait_for_successor(allocation: Allocation) -> None:
    """Wait while this job is in the queue again, though its former batch step, this one, lives.

    Slurm would take the end of this one for the end of the whole job, mark component 1 as ended,
    and never start the leader again. Once the new life runs it ignores its predecessor's end.
    """
    reference, deadline = allocation.reference, time.monotonic() + SUCCESSOR_S
    log.warning("job %s is in the queue again: waiting here until its next life runs", reference)
    while time.monotonic() < deadline:
        try:
            if job_states([reference])[reference][0].state not in _IN_QUEUE:
                return
        except SlurmUnavailable as error:  # a controller that restarts, say
            log.warning("%s", error)
        time.sleep(_SUCCESSOR_POLL_S)
    log.error("job %s: no next life within %.0f s; leaving", reference, SUCCESSOR_S)


def requeue(allocation: Allocation) -> str:
    """Put this job back into the queue; Slurm then ends this process, so it comes last.

    Returns what scontrol complained about, for a job that is still here afterwards.
    """
    return _ask("scontrol", "requeue", allocation.reference)


def _ask(*command: str) -> str:
    """What a Slurm command prints, or why it prints nothing."""
    try:
        return run_slurm(command)
    except SlurmUnavailable as error:
        log.warning("%s", error)
        return str(error)
