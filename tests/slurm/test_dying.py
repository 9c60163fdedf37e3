"""What may happen to a run on a real Slurm, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runs
import slurm_runs
from same_runs import assert_trained_once
from slurm_cluster import Cluster, running_cluster
from slurm_grpo.staging.shards import list_shards
from slurm_runs import SlurmRun

pytestmark = pytest.mark.slurm
ModelDir = Callable[[], Path]
LONG: dict[str, Any] = {"run": {"steps": 10_000}, "trainer": {"checkpoint": {"every_steps": 1}}}
MANY_STEPS = 40
"""At an eighth of a second each: the run must not be through before something happens to it."""


@pytest.fixture
def submit(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> Iterator[Callable[[dict[str, Any]], SlurmRun]]:
    """Submits a heterogeneous run, which ends with the test at the latest."""

    def submit_run(changes: dict[str, Any]) -> SlurmRun:
        return slurm_runs.submit(
            cluster, slurm_runs.write_config(tmp_path, tiny_model_dir(), changes)
        )

    yield submit_run
    cluster.cancel_all()


Submit = Callable[[dict[str, Any]], SlurmRun]


def assert_ended(job: SlurmRun) -> None:
    """It is not in the queue, and nothing of it is alive."""
    assert not [row for row in job.cluster.squeue(job.job) if row.state not in slurm_runs.ENDED]
    job.wait_gone()


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, submit: Submit) -> None:
    job = submit(LONG)
    job.wait_step(1)
    cluster.run("scancel", job.job)
    assert job.wait_end() == ["CANCELLED", "CANCELLED"], job.explain()
    assert_ended(job)
    assert job.record()["status"] == "interrupted"
    assert "Slurm is ending the job" in job.output


@pytest.mark.slow
def test_a_cancelled_component_ends_the_job_for_good(cluster: Cluster, submit: Submit) -> None:
    job = submit(LONG)
    job.wait_step(1)
    cluster.run("scancel", str(int(job.job) + 1))
    assert job.wait_end() == ["FAILED", "CANCELLED"], job.explain()
    assert_ended(job)
    assert "component 1" in job.output


@pytest.mark.slow
def test_the_time_limit_requeues(cluster: Cluster, submit: Submit) -> None:
    """Without the signal before it, which would have come first."""
    job = submit({**LONG, "cluster": {"time_limit": "2"}, "site": {"remove_flags": ["signal"]}})
    job.wait_checkpoint(1)
    runs.wait_until(lambda: job.record()["status"] != "running", 240, "the limit")
    job.wait_attempt(1)
    assert "the time limit is reached" in job.output
    assert job.wait_continued(1) >= 1
    cluster.run("scancel", job.job)
    job.wait_end()


def test_a_killed_engine_is_restarted_while_the_trainer_goes_on(submit: Submit) -> None:
    job = submit({"run": {"steps": MANY_STEPS}})
    job.wait_step(2)
    slurm_runs.kill(job.role("engine-0"))
    assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert_trained_once(job.run, 4 * MANY_STEPS)
    assert {name.incarnation for _, name in list_shards(job.run)} == {0, 1}
    assert job.run.attempt_numbers() == [0]
    assert "engine-0 ended (killed by SIGKILL); restart 1 of 3" in job.output


def test_a_killed_trainer_rank_costs_a_requeue_when_a_checkpoint_was_made(submit: Submit) -> None:
    changes = {
        "run": {"steps": MANY_STEPS},
        "trainer": {"n_ranks": 2, "checkpoint": {"every_steps": 2}},
        "cluster": {"trainers": {"nodes": 2}},
    }
    job = submit(changes)
    job.wait_checkpoint(2)
    slurm_runs.kill(job.role("trainer-1"))
    job.wait_attempt(1)
    assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert "trainer-1 ended on train2: killed by SIGKILL" in job.output
    assert_trained_once(job.run, 4 * MANY_STEPS)


def test_a_failing_run_shows_as_failed_with_the_traceback_last(submit: Submit) -> None:
    job = submit({"trainer": {"optimizer": {"lr": 1e30}, "schedule": {"warmup_steps": 0}}})
    assert job.wait_end() == ["FAILED", "FAILED"], job.explain()
    assert_ended(job)
    last = job.output.rstrip().splitlines()[-1]
    assert last == job.run.attempt(0).log("trainer-0").read_text().rstrip().splitlines()[-1]
    assert "Error: " in last
    assert runs.summary(job.run)["status"] == "failed"


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_along(submit: Submit) -> None:
    job = submit(LONG)
    job.wait_step(1)
    slurm_runs.kill(job.supervisor())
    assert job.wait_end()[0] == "FAILED", job.explain()
    job.cluster.check_nothing_survives()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["trainers", "generators"])
def test_the_loss_of_a_node_requeues_and_the_run_goes_on(
    cluster: Cluster, submit: Submit, side: str
) -> None:
    """The leader's node splits the job: component 1 goes on, and its old tasks must be ended."""
    job = submit(LONG)
    job.wait_checkpoint(2)
    before = job.processes()
    (node,) = job.record()["nodes"][side]
    cluster.kill_node(node)
    try:
        runs.wait_until(
            lambda: len(job.run.attempt_numbers()) > 1 or "PENDING" in states(job), 240, "requeue"
        )
        job.wait_attempt(1)
        assert job.wait_continued(1) >= 2
        assert not set(before) & set(job.processes())
    finally:
        cluster.start_node(node)
    cluster.run("scancel", job.job)
    job.wait_end()


def states(job: SlurmRun) -> set[str]:
    return {row.state for row in job.cluster.squeue(job.job)}


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [0, 60])
def test_a_preempted_run_comes_back(cluster: Cluster, submit: Submit, grace_s: int) -> None:
    """With grace, from a checkpoint at the next boundary; without, from the last one."""
    cluster.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace_s}")
    every = {"trainer": {"checkpoint": {"every_steps": 0 if grace_s else 1}}}
    groups = {"cluster": {g: {"partition": "low"} for g in ("generators", "trainers")}}
    job = submit(runs.merge(runs.merge(LONG, every), groups))
    job.wait_step(2)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N", "4", "--exclusive", "-o", "/dev/null",
        "--wrap", "sleep 1",
    ).strip()  # fmt: skip
    cluster.wait_state(urgent, "COMPLETED")
    job.wait_attempt(1)
    assert job.wait_continued(1) >= 1
    cluster.run("scancel", job.job)
    job.wait_end()
    if grace_s:
        assert "Slurm wants the nodes for another job" in job.output
        assert job.record(0)["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["supervisor", "cancel"])
def test_nothing_survives_where_slurm_tracks_process_groups_only(
    tmp_path: Path, tiny_model_dir: ModelDir, how: str
) -> None:
    with running_cluster(proctrack="pgid") as cluster:
        job = slurm_runs.submit(cluster, slurm_runs.write_config(tmp_path, tiny_model_dir(), LONG))
        job.wait_step(1)
        if how == "supervisor":
            slurm_runs.kill(job.supervisor())
        else:
            cluster.run("scancel", job.job)
        job.wait_end()
        cluster.check_nothing_survives()
