"""The test cluster itself: what tests/slurm/cluster.sh and its fixture promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from runs import wait_until
from slurm_cluster import SCRIPT, Cluster, running_cluster, why_not

pytestmark = pytest.mark.slurm

HET = """#!/bin/bash
#SBATCH --partition=gen --nodes=1 --gpus-per-node=2 --output=/dev/null --requeue
#SBATCH hetjob
#SBATCH --partition={trainers} --nodes=1 --gpus-per-node=4
srun --het-group=0 bash -c 'echo $SLURM_JOB_NODELIST $CUDA_VISIBLE_DEVICES' >{out}.0
srun --het-group=1 bash -c 'echo $SLURM_JOB_NODELIST $CUDA_VISIBLE_DEVICES' >{out}.1
{end}
"""


def submit(cluster: Cluster, tmp_path: Path, text: str) -> str:
    script = tmp_path / "job.sh"
    script.write_text(text)
    return cluster.run("sbatch", "--parsable", script).strip()


def test_heterogeneous_job_runs_on_both_groups_with_their_gpus(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = submit(cluster, tmp_path, HET.format(trainers="early", out=out, end=""))
    rows = cluster.wait_state(job, "COMPLETED")
    assert [row.nodes[:3] for row in rows] == ["gen", rows[1].nodes]
    assert rows[1].nodes < rows[0].nodes  # trainer hosts sort before generator hosts
    assert Path(f"{out}.0").read_text().split() == [rows[0].nodes, "0,1"]
    assert Path(f"{out}.1").read_text().split() == [rows[1].nodes, "0,1,2,3"]


def test_requeued_job_starts_again_soon(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    end = f"echo $SLURM_RESTART_COUNT >>{out}.starts; sleep 1000"
    job = submit(cluster, tmp_path, HET.format(trainers="train", out=out, end=end))
    cluster.wait_state(job, "RUNNING")
    cluster.run("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING")
    cluster.wait_state(job, "RUNNING")
    cluster.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")


def test_high_partition_preempts_and_requeues_low(cluster: Cluster, tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -p {} -N4 --exclusive --output=/dev/null\nsrun sleep 1000\n"
    low = submit(cluster, tmp_path, text.format("low"))
    cluster.wait_state(low, "RUNNING")
    high = submit(cluster, tmp_path, text.format("high"))
    cluster.wait_state(high, "RUNNING")
    cluster.wait_state(low, "PENDING")
    cluster.run("scancel", high, low)
    for job in (high, low):
        cluster.wait_state(job, "CANCELLED")


def test_killed_node_comes_back(cluster: Cluster) -> None:
    cluster.kill_node("a2")
    with pytest.raises(AssertionError, match="no slurmd of a2"):
        cluster.kill_node("a2")
    cluster.start_node("a2")
    assert cluster.run("srun", "-w", "a2", "-p", "early", "echo", "here") == "here\n"


def test_cluster_started_twice_is_one_cluster_and_stops_without_a_trace(
    slurm_works: None, tmp_path: Path
) -> None:
    directory = tmp_path / "c"

    def script(verb: str) -> str:
        done = subprocess.run(
            ["bash", SCRIPT, verb, directory], capture_output=True, text=True, check=True
        )
        return done.stdout

    said = []

    def seconds_to_start() -> float:
        script("stop")
        started = time.monotonic()
        said.append(script("start"))
        return time.monotonic() - started

    # The best of three, since other work on a test machine must not decide.
    assert any(seconds_to_start() < 20 for _ in range(3))
    assert {*said, script("start")} == {f"export SLURM_CONF='{directory}/slurm.conf'\n"}
    script("stop")
    script("stop")
    assert not directory.exists()
    assert not mentions(directory)


def test_two_clusters_side_by_side_with_pgid_and_a_job_left_running(slurm_works: None) -> None:
    with running_cluster(proctrack="pgid") as one, running_cluster() as other:
        for each in (one, other):
            each.run("sbatch", "-o/dev/null", "--wrap", "setsid sleep 1000 & sleep 1000")
        for each in (one, other):
            (job,) = each.live_jobs()
            each.wait_state(job.job, "RUNNING")
            wait_until(partial(each.processes, f"SLURM_JOB_ID={job.job}"), 60, "its processes")
        assert "proctrack/pgid" in one.run("scontrol", "show", "config")
    assert not mentions(one.directory) + mentions(other.directory)


def test_cluster_with_accounting_remembers_jobs(slurm_works: None) -> None:
    if reason := why_not(accounting=True):
        pytest.skip(f"NOT RUN: {reason}")
    with running_cluster(accounting=True) as cluster:
        job = cluster.run("sbatch", "--parsable", "-o/dev/null", "--wrap", "exit 3").strip()
        cluster.wait_state(job, "FAILED")
        asked = ("sacct", "-nPXj", job, "-oState,ExitCode")
        wait_until(lambda: "FAILED|3:0" in cluster.run(*asked), 120, "the record of its end")


def test_cluster_ends_with_the_process_that_owns_it(slurm_works: None) -> None:
    code = (
        "import time\n"
        "from slurm_cluster import running_cluster\n"
        "with running_cluster() as cluster:\n"
        "    print(cluster.directory, flush=True)\n"
        "    time.sleep(100)\n"
    )
    tests = SCRIPT.parents[1]
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
    )
    assert owner.stdout is not None
    directory = Path(owner.stdout.readline().strip())
    assert mentions(directory)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not directory.exists() and not mentions(directory), 120, "its end")


def mentions(directory: Path) -> list[str]:
    """Processes whose command line or environment names the directory."""
    needle, found = str(directory).encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if any(needle in text for text in words):
            found.append(f"{process.name} {words[0].decode(errors='replace')}")
    return found
