"""Asking a real Slurm about jobs, and the commands that follow and end a run on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import ROOT, TESTS, step_rows, wait_until
from slurm_cluster import Cluster, running_cluster, why_not
from slurm_grpo.commands.main import main
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import ClusterConfig, Config
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.attempt import AttemptRecord
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import stand
from slurm_grpo.slurm.queue import ComponentState, cancel_jobs, job_states, jobs_of_script
from slurm_runs import submit as submit_run
from slurm_runs import write_config

pytestmark = pytest.mark.slurm

SLEEP = "#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1000\n"
HET = (
    "#!/bin/bash\n#SBATCH -p gen --output=/dev/null {first}\n#SBATCH hetjob\n#SBATCH -p train\n"
    "sleep 1000\n"
)


@pytest.fixture(autouse=True)
def slurm_conf(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process asks the test's cluster, whatever the user's own settings of squeue are."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(TESTS))  # where the reward function is
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    yield
    cluster.cancel_all()


def submit(cluster: Cluster, script: Path, text: str, *flags: str) -> str:
    script.write_text(text)
    return cluster.run("sbatch", "--parsable", *flags, script).strip()


def states(job_id: str) -> list[tuple[int, int | None, str]]:
    return [(s.component, s.task, s.state) for s in job_states([job_id])[job_id]]


def but_for_time(state: ComponentState) -> ComponentState:
    """What stays the same from one second to the next."""
    return replace(state, left="", elapsed="")


def test_components_of_a_heterogeneous_job_are_told_apart(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path / "het.sh", HET.format(first=""))
    cluster.wait_state(job, "RUNNING")
    first, second = job_states([job])[job]
    assert (first.component, first.state, first.nodes[:3]) == (0, "RUNNING", "gen")
    assert (second.component, second.state, second.nodes[:5]) == (1, "RUNNING", "train")
    assert second.own_id == str(int(job) + 1)
    (same,) = job_states([second.own_id])[second.own_id]
    assert but_for_time(same) == but_for_time(second)
    cancel_jobs([job])
    cluster.wait_state(job, "CANCELLED")
    assert states(job) == [(0, None, "CANCELLED"), (1, None, "CANCELLED")]


def test_elements_of_an_array_are_told_apart_while_they_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "array.sh"
    array = submit(cluster, script, SLEEP, "--array=0-4,7%2")
    wait_until(lambda: [s for _, _, s in states(array)].count("RUNNING") == 2, 120, "two to run")
    assert [task for _, task, _ in states(array)] == [0, 1, 2, 3, 4, 7]
    assert states(f"{array}_3") == [(0, 3, "PENDING")]
    running = job_states([f"{array}_1"])[f"{array}_1"][0]
    (same,) = job_states([running.own_id])[running.own_id]
    assert but_for_time(same) == but_for_time(running)
    assert sorted(s.task or 0 for s in jobs_of_script(script)) == [0, 1, 2, 3, 4, 7]
    assert jobs_of_script(tmp_path / "other.sh") == []
    cancel_jobs([f"{array}_3", f"{array}_1"])
    # An element that had not begun is forgotten at once.
    ended = [(0, 1, "CANCELLED")], [(0, 3, "UNKNOWN")]
    wait_until(lambda: (states(f"{array}_1"), states(f"{array}_3")) == ended, 120, f"{ended}")
    assert states(f"{array}_0") == [(0, 0, "RUNNING")]


def test_what_slurm_never_heard_of_is_unknown_and_cancels_without_complaint(
    cluster: Cluster,
) -> None:
    assert states("999999") == [(0, None, "UNKNOWN")]
    assert states("999999_4") == [(0, 4, "UNKNOWN")]
    cancel_jobs(["999999"])


def test_accounting_remembers_what_squeue_has_forgotten(
    slurm_works: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not(accounting=True):
        pytest.skip(f"NOT RUN: {reason}")
    monkeypatch.delenv("SLURM_CLUSTERS")  # or the cluster's own commands would look elsewhere
    with running_cluster(accounting=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        forget_soon(cluster)
        text = HET.format(first="").replace("sleep 1000", "exit 3")
        het = submit(cluster, tmp_path / "het.sh", text)
        array = submit(cluster, tmp_path / "a.sh", SLEEP.replace("1000", "0"), "--array=1,2")
        wait_until(lambda: not cluster.squeue(), 180, "squeue to forget both")
        # The controller tells accounting in its own time.
        ended = [(0, None, "FAILED"), (1, None, "FAILED")]
        wait_until(lambda: states(het) == ended, 120, f"{ended}, not {states(het)}")
        done = [(0, 1, "COMPLETED"), (0, 2, "COMPLETED")]
        wait_until(lambda: states(array) == done, 120, f"{done}, not {states(array)}")
        assert states(f"{array}_2") == done[1:]


def test_without_accounting_files_decide_once_slurm_has_forgotten(
    slurm_works: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, done = (RunDir(tmp_path / name) for name in ("silent", "done"))
    monkeypatch.delenv("SLURM_CLUSTERS")
    with running_cluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        for run in (silent, done):
            (run.root / "jobs/0").mkdir(parents=True)
            job = submit(
                cluster, run.root / "jobs/0/batch.sh", SLEEP.replace("sleep 1000", "exit 3")
            )
            (run.root / "jobs/0/job_id").write_text(job)
        done.attempt(0).root.mkdir(parents=True)
        AttemptRecord(done.attempt(0)).renew(peak_pss_bytes=0, status="done")
        wait_until(lambda: stand(silent).word == "failed", 120, "the job to fail")
        assert stand(silent).detail == "before it began; Slurm: FAILED"
        assert stand(done).word == "done"
        forget_soon(cluster)
        wait_until(lambda: not cluster.squeue(), 180, "squeue to forget both")
        assert stand(silent).word == "not started"
        assert stand(silent).detail.startswith("Slurm has forgotten job ")
        assert stand(done).word == "done"


def forget_soon(cluster: Cluster) -> None:
    conf = cluster.directory / "slurm.conf"
    conf.write_text(re.sub(r"MinJobAge=\d+", "MinJobAge=2", conf.read_text()))
    cluster.run("scontrol", "reconfigure")


def test_a_queued_run_is_seen_and_cancelled(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "r")
    (run.root / "jobs/0").mkdir(parents=True)
    freeze_config(Config(cluster=ClusterConfig(kind="slurm")), run.config)
    job = submit(cluster, run.root / "jobs/0/batch.sh", HET.format(first="--begin=now+1hour"))
    (run.root / "jobs/0/job_id").write_text(f"{job}\n")
    wait_until(lambda: stand(run).detail == "BeginTime", 120, "the reason")
    assert stand(run).word == "queued"
    assert main(["status", str(run.root)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert text.startswith("r: queued")
    assert re.search(r"generators +PENDING \(BeginTime\) expected 20\d\d-", text)
    assert main(["cancel", str(run.root)]) == ExitCode.OK
    assert capsys.readouterr().out == f"{run.root}: cancelled.\n"
    assert stand(run).word == "cancelled"
    assert main(["cancel", str(run.root)]) == ExitCode.OK
    assert "nothing to cancel" in capsys.readouterr().out


def test_a_run_is_followed_across_a_requeue_cancelled_and_resumed(
    cluster: Cluster,
    tmp_path: Path,
    tiny_model_dir: Callable[[], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {
        "run": {"steps": 400},
        "algorithm": {"groups_per_step": 2, "group_size": 2},
        "trainer": {"checkpoint": {"every_steps": 0}},
    }
    job = submit_run(cluster, write_config(tmp_path, tiny_model_dir(), changes))
    name = str(job.run.root)
    followed = tmp_path / "followed.txt"
    with followed.open("wb") as out:
        program = [
            sys.executable,
            "-c",
            "import sys; from slurm_grpo.commands.main import main; main()",
        ]
        arguments = ["logs", name, "--follow", "--role", "trainer"]
        follower = subprocess.Popen(
            [*program, *arguments], stdout=out, stderr=out, env=cluster.env, cwd=ROOT
        )
    try:
        job.wait_step(2)
        report = status(name, capsys)
        parts = report["job"]["components"]
        assert (report["state"], report["attempt"]) == ("running", 0)
        assert [(c["name"], c["state"]) for c in parts] == [
            ("generators", "RUNNING"),
            ("trainers", "RUNNING"),
        ]
        assert report["step"] >= 2
        assert report["remaining_s"] > 0
        assert report["trained_tokens_per_s"] > 0

        job.usr1()
        job.wait_attempt(1)
        wait_until(lambda: step_rows(job.run)[-1]["attempt"] == 1, 240, "a step of attempt 1")
        report = status(name, capsys)
        assert (report["state"], report["attempt"], report["n_attempts"]) == ("running", 1, 2)
        assert report["checkpoint"] > 0

        assert main(["cancel", name]) == ExitCode.OK
        assert capsys.readouterr().out == f"{name}: cancelled.\n"
        assert [row.state for row in cluster.squeue(job.job)] == ["CANCELLED", "CANCELLED"]
        assert job.wait_end() == ["CANCELLED", "CANCELLED"]
        assert status(name, capsys)["state"] in ("cancelled", "interrupted")
        assert follower.wait(180) == 0  # it asks Slurm every half a minute
    finally:
        follower.kill()
        follower.wait()
    text = followed.read_text()
    assert "==> test: attempt 1 <==" in text
    first = job.run.attempt(0).log("trainer-0").read_text()
    second = job.run.attempt(1).log("trainer-0").read_text()
    shown = [line for line in text.splitlines() if not line.startswith(("==> ", "srun: "))]
    assert shown == (first + second).splitlines()

    done = status(name, capsys)["step"]
    assert main(["resume", name, "--run.steps", str(done + 1)]) == ExitCode.OK
    assert main(["status", name]) == ExitCode.OK
    capsys.readouterr()
    wait_until(lambda: not stand(job.run).is_alive, 400, "the resumed run to end")
    report = status(name, capsys)
    assert (report["state"], report["step"]) == ("done", done + 1), job.explain()


def status(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", name, "--json"]) == ExitCode.OK
    return dict(json.loads(capsys.readouterr().out))
