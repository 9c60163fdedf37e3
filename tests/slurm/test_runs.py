"""Whole runs on a real Slurm, with the real engines on a tiny model: to the end, and back again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import slurm_runs
from same_runs import assert_trained_once
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
    assert job.processes() == []
