"""What Submitit is told differently: the command, the job id, when a job is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import SlurmUnavailable, SubmissionRefused
from slurm_grpo.jobs.executor import QueueWatcher, RunExecutor
from slurm_grpo.slurm.submit_env import leftovers, parse_job_id, refusal, run_sbatch

INSIDE_A_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_MEM_PER_CPU": "1000",
    "SLURM_HET_SIZE": "2",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_EXPORT_ENV": "NONE",
    "SRUN_CPUS_PER_TASK": "4",
    "SBATCH_PARTITION": "debug",
    "PMI_RANK": "1",
    "PMIX_RANK": "1",
    "RANK": "0",
    "MASTER_ADDR": "gen1",
    "SUBMITIT_FOLDER": "/elsewhere",
    "CUDA_VISIBLE_DEVICES": "3",
}


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunExecutor:
    """On a machine where `srun` and `sbatch` are scripts of the test."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "sbatch"):
        (commands / name).write_text('#!/bin/sh\nenv > "$0.env"; echo out of luck >&2; exit 1\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    return RunExecutor(tmp_path / "job", Config())


def test_a_job_inherits_nothing_of_the_job_it_is_submitted_from() -> None:
    login = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/root"}
    assert leftovers(login | INSIDE_A_JOB) == sorted(INSIDE_A_JOB)


def test_gpus_chosen_on_a_login_node_are_passed_on() -> None:
    assert leftovers({"CUDA_VISIBLE_DEVICES": "3"}) == []


def test_sbatch_is_started_without_them_and_its_complaint_is_the_error(
    executor: RunExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in INSIDE_A_JOB.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SubmissionRefused, match="sbatch refused the job:\nout of luck\n"):
        executor.submit_run(str.encode, tmp_path)  # type: ignore[arg-type]
    seen = (tmp_path / "bin/sbatch.env").read_text().splitlines()
    assert not {line.partition("=")[0] for line in seen} & INSIDE_A_JOB.keys()
    assert f"PATH={os.environ['PATH']}" in seen
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("12\n", "12"),
        ("12;cluster\n", "12"),
        ("This is job 3 of your quota of 5\n12\nHave a nice day\n", "12"),
    ],
)
def test_the_job_id_is_told_from_a_sites_banner(text: str, job_id: str) -> None:
    assert parse_job_id(text) == job_id


def test_an_answer_without_an_id_is_shown() -> None:
    with pytest.raises(SubmissionRefused, match="Submitted batch job twelve"):
        parse_job_id("Submitted batch job twelve\n")


def test_a_sweep_with_more_elements_than_the_cluster_numbers_is_told_its_limit() -> None:
    words = "sbatch: error: Batch job submission failed: Invalid job array specification"
    assert "below MaxArraySize" in str(refusal(words))
    assert "MaxArraySize" not in str(refusal("Invalid account"))


def test_without_slurm_the_error_says_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmUnavailable, match="login node"):
        run_sbatch(["--test-only"])


def test_a_job_that_slurm_was_never_asked_about_is_not_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # as while the controller restarts
    watcher = QueueWatcher()
    assert not watcher.is_done("12")
    assert not watcher.is_done("12", mode="force")


def test_importing_the_executor_imports_no_torch() -> None:
    script = "import sys, slurm_grpo.jobs.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
