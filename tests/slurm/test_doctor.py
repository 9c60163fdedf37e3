"""`slurm-grpo doctor` on the test cluster: what passes, and that each thing wrong is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from model_shell import make_model_shell
from slurm_cluster import Cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
MAIN = "import sys; from slurm_grpo.commands.main import main; sys.exit(main())"
Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(cluster: Cluster, tmp_path: Path) -> Doctor:
    """Calls the command with a site for one machine; its exit code and text."""
    site = tmp_path / "site.yaml"
    site.write_text("interface: lo\n")

    def call(*words: object, options: tuple[object, ...] = ()) -> tuple[int, str]:
        options = ("--run.runs_dir", tmp_path / "runs", *options)
        command = [sys.executable, "-c", MAIN, "doctor", "--site", site, *words, "--", *options]
        done = subprocess.run(
            [str(word) for word in command],
            env=cluster.env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return call


def failures(text: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("FAIL")]


def test_a_cluster_that_can_run_it_passes_and_keeps_nothing(
    doctor: Doctor, cluster: Cluster, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    settings = {
        "model": {"path": str(make_model_shell(tmp_path / "model"))},
        "cluster": {
            "kind": "slurm",
            "generators": {"partition": "gen"},
            "trainers": {"partition": "early"},  # hosts that sort before the generators'
            "time_limit": "10",
        },
    }
    config.write_text(yaml.safe_dump(settings))
    code, text = doctor("--config", config)
    assert (code, failures(text)) == (0, []), text
    for group in ("generators on gen", "trainers on a"):
        for what in ("packages", "model files", "shared directory", "network", "broadcast"):
            assert any(
                line.startswith(f"pass         {group}") and f", {what}: " in line
                for line in text.splitlines()
            ), f"{group}, {what} is not in\n{text}"
    for line in ("scheduler: sched/backfill", "cluster.trainers.partition: early is up", "sbatch:"):
        assert f"pass         {line}" in text
    assert not list((tmp_path / "runs").iterdir())


def test_one_allocation_of_two_nodes_is_looked_at_too(doctor: Doctor) -> None:
    allocation = ("--cluster.allocation", "split", "--cluster.shared.partition", "all")
    code, text = doctor(options=(*allocation, "--cluster.shared.nodes", 2))
    assert (code, failures(text)) == (0, []), text
    assert "trainers on" in text
    assert "not checked  model and sizes: no --config was given" in text


def test_gpus_that_torch_cannot_use_are_a_failure_and_the_logs_are_kept(
    doctor: Doctor, tmp_path: Path
) -> None:
    """The cluster's GPUs are pretended, and this torch may be for CPUs."""
    gpus = ("--cluster.generators.gpus_per_node", 2, "--cluster.trainers.gpus_per_node", 2)
    code, text = doctor(options=(*gpus, "--cluster.trainers.partition", "train"))
    assert code == 1
    assert len([line for line in failures(text) if "GPUs: torch" in line]) == 2, text
    (kept,) = (tmp_path / "runs").iterdir()
    assert f"kept for a look: {kept}" in text


def test_a_job_that_does_not_start_is_cancelled_and_slurms_reason_told(
    doctor: Doctor, cluster: Cluster
) -> None:
    cluster.run("scontrol", "update", "PartitionName=early", "State=DOWN")
    try:
        code, text = doctor("--wait-s", 3, options=("--cluster.trainers.partition", "early"))
    finally:
        cluster.run("scontrol", "update", "PartitionName=early", "State=UP")
    assert code == 1
    down, job = failures(text)
    assert down.startswith("cluster.trainers.partition: early is down")
    assert "did not start within 3 s: PartitionDown" in job
    assert not cluster.live_jobs()


def test_what_sbatch_refuses_and_a_broken_setup_line_are_told(doctor: Doctor) -> None:
    code, text = doctor(options=("--cluster.generators.constraint", "h200"))
    assert code == 1
    (refused,) = failures(text)
    assert "Invalid feature specification" in refused
    code, text = doctor(options=("--site.setup", "echo no such module; exit 3"))
    assert code == 1
    (broken,) = failures(text)
    assert "is FAILED and said: no such module" in broken


def test_an_unknown_partition_is_named_with_those_there_are(doctor: Doctor) -> None:
    code, text = doctor(options=("--cluster.generators.partition", "gpu"))
    assert code == 1
    assert failures(text)[0].startswith("cluster.generators.partition: gpu; there are all, early")
