"""Whole runs on a real Slurm, with the real engines on a tiny model: to the end, and back again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runs
import slurm_runs
from same_runs import assert_same_run, assert_trained_once
from slurm_cluster import Cluster
from slurm_grpo.staging.shards import list_shards

pytestmark = pytest.mark.slurm
ModelDir = Callable[[], Path]


def test_a_heterogeneous_job_runs_to_its_end(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    """Two engines on two nodes, three ranks on two: names, logs, exit codes, cost."""
    changes = {
        "cluster": {
            "generators": {"nodes": 2, "gpus_per_node": 1},
            "trainers": {"nodes": 2, "gpus_per_node": 2},
        },
        "generator": {"n_engines": 2},
        "trainer": {"n_ranks": 3},
        "run": {"steps": 2},
    }
    config = slurm_runs.write_config(tmp_path, tiny_model_dir(), changes)
    job = slurm_runs.submit(cluster, config)

    assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert_trained_once(job.run, 8)
    assert {name.engine_id for _, name in list_shards(job.run)} == {0, 1}
    record = job.record()
    assert (record["job_id"], record["status"]) == (job.job, "done")
    assert record["nodes"] == {"generators": ["gen1", "gen2"], "trainers": ["train1", "train2"]}
    peers = ("engine-0", "engine-1", "trainer-0", "trainer-1", "trainer-2")
    for peer in peers:
        assert job.run.attempt(0).exit_code(peer).read_text() == "0\n"
        assert job.run.attempt(0).log(peer).exists()
    assert "torch" in runs.summary(job.run)["versions"]
    job.wait_gone()


def test_one_node_is_shared_by_both_sides(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {"cluster": {"shared": {"partition": "gen", "gpus_per_node": 2}}}
    config = slurm_runs.write_config(tmp_path, tiny_model_dir(), changes, slurm_runs.SPLIT)
    job = slurm_runs.submit(cluster, config)

    assert job.wait_end() == ["COMPLETED"], job.explain()
    assert_trained_once(job.run, 12)
    nodes = job.record()["nodes"]
    assert nodes["generators"] == nodes["trainers"]


@pytest.mark.slow
def test_an_allocation_is_cut_between_nodes(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    """The engine has one GPU of the first node, ranks its other one and both of the next."""
    changes = {
        "cluster": {"shared": {"partition": "gen", "nodes": 2, "gpus_per_node": 2}},
        "generator": {"n_engines": 1},
        "trainer": {"n_ranks": 3},
        "run": {"steps": 2},
    }
    config = slurm_runs.write_config(tmp_path, tiny_model_dir(), changes, slurm_runs.SPLIT)
    job = slurm_runs.submit(cluster, config)

    assert job.wait_end() == ["COMPLETED"], job.explain()
    assert_trained_once(job.run, 8)
    assert job.record()["nodes"] == {"generators": ["gen1"], "trainers": ["gen1", "gen2"]}


@pytest.mark.slow
def test_trainer_hosts_may_sort_before_the_generators(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes = {
        "cluster": {"trainers": {"partition": "early", "nodes": 2}},
        "trainer": {"n_ranks": 2},
        "run": {"steps": 2},
    }
    job = slurm_runs.submit(cluster, slurm_runs.write_config(tmp_path, tiny_model_dir(), changes))
    assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert_trained_once(job.run, 8)
    nodes = job.record()["nodes"]
    assert nodes["trainers"] == ["a1", "a2"] < nodes["generators"]


def test_a_run_requeued_in_the_middle_equals_the_uninterrupted_one(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    changes: dict[str, Any] = {
        "run": {"steps": 40},  # of an eighth of a second: it must not be through before the signal
        "trainer": {"checkpoint": {"every_steps": 0}},
    }
    whole = runs.launch(runs.write_config(tmp_path / "whole", tiny_model_dir(), changes))
    config = slurm_runs.write_config(tmp_path / "cut", tiny_model_dir(), changes)
    job = slurm_runs.submit(cluster, config)
    job.wait_step(2)
    job.usr1()
    job.wait_attempt(1)

    assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert_same_run(job.run, whole)
    assert job.record(0)["status"] == "stopped"
    assert (job.record()["status"], job.record()["restart_count"]) == ("done", 1)
    assert 2 <= int(job.run.attempt(1).resumed_from.read_text()) < 40


@pytest.mark.slow
def test_two_jobs_run_on_the_same_nodes_at_once(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: ModelDir
) -> None:
    configs = [
        slurm_runs.write_config(tmp_path / name, tiny_model_dir(), {"run": {"steps": 40}})
        for name in ("one", "two")
    ]
    jobs = [slurm_runs.submit(cluster, config) for config in configs]
    for job in jobs:
        job.wait_step(1)
    assert jobs[0].record()["nodes"] == jobs[1].record()["nodes"]
    for job in jobs:
        assert job.wait_end() == ["COMPLETED", "COMPLETED"], job.explain()
    assert_same_run(jobs[0].run, jobs[1].run)
