"""Steps by srun, with simple programs in place of the roles: the supervisor's side is this test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runs import wait_until
from slurm_cluster import Cluster
from slurm_grpo.config.schema import ClusterConfig, Config, NodesConfig, SiteConfig, TrainerConfig
from slurm_grpo.jobs import srun_steps
from slurm_grpo.jobs.srun_steps import SrunLauncher
from slurm_grpo.run.directory import AttemptDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.slurm.allocation import Allocation, Component, expand_hosts
from slurm_grpo.supervisor.steps import StepSpec
from step_conformance import StepConformance, python, spec, wait_for_end, wait_for_line

pytestmark = pytest.mark.slurm

CONFIG = Config(
    trainer=TrainerConfig(n_ranks=3),
    cluster=ClusterConfig(
        kind="slurm",
        generators=NodesConfig(gpus_per_node=1),
        trainers=NodesConfig(nodes=2, gpus_per_node=2),
    ),
    site=SiteConfig(interface="lo"),
)
RANKS = ("trainer-0", "trainer-1", "trainer-2")


@pytest.fixture(scope="module")
def allocation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Allocation]:
    """A heterogeneous job that waits."""
    script = tmp_path_factory.mktemp("job") / "batch.sh"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH -t 60 -p gen -N1 --cpus-per-task=2 --gpus-per-node=1 -o /dev/null\n"
        "#SBATCH hetjob\n"
        "#SBATCH -t 60 -p train -N2 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=2\n"
        "sleep 3000\n"
    )
    job = cluster.run("sbatch", "--parsable", script).strip()
    rows = cluster.wait_state(job, "RUNNING")
    yield Allocation(
        job_id=job,
        reference=job,
        restart_count=0,
        components=tuple(
            Component(job_id=str(int(job) + k), hosts=hosts, cpus=(2,) * len(hosts))
            for k, hosts in enumerate(tuple(expand_hosts(row.nodes)) for row in rows)
        ),
    )
    cluster.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")


@pytest.fixture
def launcher(
    cluster: Cluster, allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SrunLauncher]:
    # Tasks report their own ends, however long a machine with other work takes to start them.
    monkeypatch.setattr(srun_steps, "_KILL_S", 60.0)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("SLURM_JOB_ID", allocation.job_id)
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    for k, component in enumerate(allocation.components):
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{k}", component.job_id)
    started = SrunLauncher(CONFIG, allocation)
    started.prepare(AttemptDir(tmp_path))
    yield started
    started.close()


class TestSrunSteps(StepConformance):
    """`launcher` is the fixture above."""


def ranks(tmp_path: Path, code: str) -> list[StepSpec]:
    made = [spec(tmp_path, *python(code), peer=peer) for peer in RANKS]
    return [
        replace(s, env={**s.env, "RANK": str(r), "WORLD_SIZE": "3", "LOCAL_RANK": "?", "N": str(r)})
        for r, s in enumerate(made)
    ]


def test_each_rank_of_a_step_has_its_own_place_log_and_exit_code(
    launcher: SrunLauncher, tmp_path: Path
) -> None:
    code = """
        import os, sys
        print(*(os.environ[n] for n in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")),
              sorted(n for n in os.environ if n.startswith(("SLURM_JOB", "SLURM_STEP"))))
        sys.exit(int(os.environ["N"]))
    """
    steps = launcher.start(ranks(tmp_path, code))
    assert [wait_for_end(steps[peer]) for peer in RANKS] == [0, 1, 2]
    said = [(tmp_path / f"{peer}.log").read_text() for peer in RANKS]
    assert said == ["0 0 0,1 []\n", "1 1 0,1 []\n", "2 0 0 []\n"]
    assert [(tmp_path / f"{peer}.exit").read_text() for peer in RANKS] == ["0\n", "1\n", "2\n"]
    assert [steps[peer].where for peer in RANKS] == [" on train1", " on train1", " on train2"]


def test_the_end_of_one_rank_is_known_while_the_others_run(
    launcher: SrunLauncher, tmp_path: Path
) -> None:
    """Of one that reports, and of one whose task is killed before it can."""
    code = """
        import os, time
        print(os.getppid(), flush=True)
        time.sleep(600 if os.environ["N"] != "1" else 0)
    """
    steps = launcher.start(ranks(tmp_path, code))
    assert wait_for_end(steps["trainer-1"]) == 0
    os.kill(int(wait_for_line(tmp_path / "trainer-2.log")), signal.SIGKILL)
    assert wait_for_end(steps["trainer-2"]) == -signal.SIGKILL
    assert steps["trainer-0"].poll() is None
    steps["trainer-0"].kill()
    assert wait_for_end(steps["trainer-0"]) == -signal.SIGKILL


def test_sigterm_from_slurm_is_reported_and_not_obeyed(
    cluster: Cluster, launcher: SrunLauncher, allocation: Allocation, tmp_path: Path
) -> None:
    one = spec(tmp_path, *python("print(1, flush=True); import time; time.sleep(600)"))
    step = launcher.start([one])["engine-0"]
    wait_for_line(one.log)
    assert not launcher.told_to_end()
    cluster.run("scancel", "--signal=TERM", allocation.job_id)

    def is_told() -> bool:
        assert step.poll() is None
        return launcher.told_to_end()

    wait_until(is_told, 60, "the task's report of SIGTERM")
    assert launcher.why_told()[0] is Ending.SIGNALLED  # by a person: Slurm goes on
    assert step.poll() is None
    step.kill()
    wait_for_end(step)


def test_a_step_that_slurm_refuses_ends_with_its_words(
    launcher: SrunLauncher, allocation: Allocation, tmp_path: Path
) -> None:
    elsewhere = replace(allocation.components[0], hosts=("gen9",))
    wrong = replace(allocation, components=(elsewhere, allocation.components[1]))
    lost = SrunLauncher(CONFIG, wrong)
    lost.prepare(AttemptDir(tmp_path))
    step = lost.start([spec(tmp_path, *python("pass"))])["engine-0"]
    assert wait_for_end(step) == 1
    assert "srun: error:" in step.log.read_text()
    lost.close()
