"""`launch/submit.py` against a real Slurm. The jobs' supervisors never start here: a site's setup
lines end the batch script first."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import yaml
from submitit.core.utils import UncompletedJobError

import slurm_grpo
from model_shell import make_model_shell
from runs import wait_until
from slurm_cluster import Cluster
from slurm_grpo.config.schema import ClusterConfig, Config, NodesConfig, RunConfig
from slurm_grpo.errors import ExitCode
from slurm_grpo.jobs import executor as executor_module
from slurm_grpo.jobs.executor import RunExecutor, RunJob
from slurm_grpo.jobs.submission import snapshot_package

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ROOT / "launch/submit.py"
TWO_ENGINES = ["--generator.n_engines", 2]
SLEEP = "exec sleep 1000"
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Runs `launch/submit.py` with a configuration of both partitions, whose job does `setup` and
    ends with the test at the latest."""
    settings: dict[str, Any] = {
        "model": {"path": str(make_model_shell(tmp_path / "model"))},
        "run": {"name": "r", "runs_dir": str(tmp_path / "runs")},
        "cluster": {
            "kind": "slurm",
            "generators": {"partition": "gen", "gpus_per_node": 1},
            "trainers": {"partition": "train", "gpus_per_node": 1},
            "time_limit": "10",
        },
    }

    numbers = itertools.count()

    def submit(
        *arguments: object,
        setup: str = SLEEP,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        launcher: Path = SUBMIT,
    ) -> subprocess.CompletedProcess[str]:
        config = tmp_path / f"c{next(numbers)}.yaml"  # some submit at the same moment
        site = {"setup": [setup], "flags": list(flags)}
        config.write_text(yaml.safe_dump(settings | {"site": site}))
        command = [*prefix, sys.executable, launcher, config, *arguments]
        if "--resume" in arguments:
            command.remove(config)
        return subprocess.run(
            [str(word) for word in command],
            env={**cluster.env, **(env or {})},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
        )

    yield submit
    cluster.cancel_all()


def job_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    found = re.match(r"submitted job (\d+)\n", done.stdout)
    assert found, done.stdout
    return found[1]


def job_ids(cluster: Cluster) -> set[str]:
    return {row.job.partition("+")[0] for row in cluster.squeue()}


def test_a_submission_returns_with_the_job_in_the_queue_within_one_and_a_half_seconds(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    done = submit()
    job = job_of(done)
    rows = cluster.wait_state(job, "RUNNING")
    assert [row.nodes[:3] for row in rows] == ["gen", "tra"]

    run = tmp_path / "runs/r"
    assert done.stdout.count(str(run)) == 4
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == [
        "state",
        "follow",
        "cancel",
    ]
    assert (run / "jobs/0/job_id").read_text() == f"{job}\n"
    assert (run / "jobs" / job).resolve() == run / "jobs/0"
    assert "#SBATCH hetjob" in (run / "jobs/0/batch.sh").read_text()
    assert (run / "jobs/0/code/slurm_grpo/supervisor/supervisor.py").is_file()
    assert not list((run / "jobs/0/code").rglob("__pycache__"))

    # Processor time, and the best of a few, since other work on a test machine must not decide.
    names = (f"r{number}" for number in range(5))
    assert any(seconds_of(partial(submit, "--run.name", name)) < 1.5 for name in names)


def seconds_of(submission: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    before, start = os.times(), time.monotonic()
    done = submission()
    wall_s, after = time.monotonic() - start, os.times()
    job_of(done)
    return min(wall_s, sum(after[2:4]) - sum(before[2:4]))


def test_a_live_run_is_refused_by_its_job_until_it_has_ended(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    job = job_of(submit())
    for arguments in ([], ["--resume", tmp_path / "runs/r"]):
        again = submit(*arguments)
        assert again.returncode == ExitCode.CONFIG
        assert f"a live run has this directory ({job}, " in again.stderr
    cluster.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    assert "holds a run already" in submit().stderr
    second = job_of(submit("--resume", tmp_path / "runs/r"))
    assert (tmp_path / "runs/r/jobs/1/job_id").read_text() == f"{second}\n"


def test_of_submissions_at_the_same_moment_one_is_taken(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    before = job_ids(cluster)
    with ThreadPoolExecutor() as pool:
        done = [future.result() for future in [pool.submit(submit) for _ in range(4)]]
    assert sorted(d.returncode for d in done) == [0, *[ExitCode.CONFIG] * 3], done
    [job] = [job_of(d) for d in done if d.returncode == 0]
    for refused in (d.stderr for d in done if d.returncode):
        assert "is being made at this moment" in refused or f"({job}, " in refused
    assert job_ids(cluster) - before == {job}


def test_a_refused_job_leaves_nothing_and_slurms_words_are_shown(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    refused = submit("--cluster.trainers.account", "a", "--cluster.generators.constraint", "x|y")
    assert refused.returncode == ExitCode.CONFIG
    assert "sbatch refused the job:\n" in refused.stderr
    assert "Invalid feature specification" in refused.stderr
    assert not (tmp_path / "runs/r").exists()
    job = job_of(submit())
    cluster.run("scancel", job)
    cluster.wait_state(job, "CANCELLED")

    again = submit(
        *("--resume", tmp_path / "runs/r"),
        env={"PATH": f"{_refusing(tmp_path)}:{os.environ['PATH']}"},
    )
    assert "sbatch refused the job:\nout of order\n" in again.stderr
    assert [path.name for path in (tmp_path / "runs/r/jobs").iterdir()] != []
    assert not (tmp_path / "runs/r/jobs/1").exists()


def _refusing(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho out of order >&2; exit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    return tmp_path / "bin"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cluster.generators.nodes", 3], "partition gen has 2 such node(s)"),
        (["--cluster.trainers.gpus_per_node", 5], "partition train has 0 such node(s)"),
        (["--cluster.trainers.partition", "tarin"], "tarin; expected one of all, early, gen"),
        (["--cluster.time_limit", "2-0"], "more than the 60 minutes that partition gen allows"),
        (
            ["--cluster.trainers.partition", "gen", "--cluster.generators.nodes", 2, *TWO_ENGINES],
            "are 3 nodes, but their partitions have 2 such node(s) together",
        ),
        (["--generator.n_engines", 2], "2 engines x tensor_parallel 1 = 2 GPUs"),
    ],
)
def test_what_would_wait_for_ever_is_refused_here(
    arguments: list[object], expected: str, cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    before = job_ids(cluster)
    refused = submit(*arguments)
    assert refused.returncode == ExitCode.CONFIG
    assert expected in refused.stderr
    assert job_ids(cluster) <= before  # Slurm forgets ended jobs meanwhile
    assert not (tmp_path / "runs").exists()


def test_test_only_says_when_it_would_start_and_submits_nothing(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    before = job_ids(cluster)
    done = submit("--test-only")
    assert done.returncode == 0, done.stderr
    assert re.search(r"to start at 20\d\d-\S+ using \d+ processors", done.stdout)
    assert job_ids(cluster) <= before  # Slurm forgets ended jobs meanwhile
    assert not (tmp_path / "runs").exists()


def test_nothing_of_a_surrounding_job_reaches_the_new_one(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    """What `env` shows in the batch step, submitted from a login node and from inside a job."""

    def seen(
        name: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> set[str]:
        path = tmp_path / name
        job = job_of(
            submit("--run.name", name, setup=f"env > {path}; exit 0", prefix=prefix, env=env)
        )
        cluster.wait_state(job, "COMPLETED")
        return {line.partition("=")[0] for line in path.read_text().splitlines()} - {"_"}

    login = seen("login")
    inside = ["srun", "--partition=all", "--ntasks=1", "--mem-per-cpu=100", "--gpus-per-node=2"]
    leaks = {
        "SBATCH_PARTITION": "nowhere",
        "SLURM_RESTART_COUNT": "3",
        "PMI_RANK": "1",
        "RANK": "0",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "gen1",
    }
    inner = seen("inner", inside, leaks | {"SLURM_EXPORT_ENV": "ALL"})
    inner -= {"TMPDIR", "SHLVL", "OLDPWD", "HOSTNAME"}
    assert inner - login == set()
    assert {"SLURM_JOB_ID", "SLURM_CONF", "CUDA_VISIBLE_DEVICES"} <= inner


def test_what_is_edited_while_a_job_waits_does_not_change_it(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("slurm_grpo", "launch"):
        shutil.copytree(ROOT / name, checkout / name)
    launcher = checkout / "launch/submit.py"
    # Roles that cannot start: the supervisor's traceback tells which code it is.
    options = ["--cluster.python", "/bin/false"]
    job = job_of(submit(*options, setup="true", flags=["--hold"], launcher=launcher))
    for path in checkout.rglob("*.py"):
        path.write_text("raise SystemExit('CHANGED')")
    cluster.run("scontrol", "release", job)
    cluster.wait_state(job, "FAILED")
    said = (tmp_path / "runs/r/jobs/0/slurm.out").read_text()
    assert f"{tmp_path}/runs/r/jobs/0/code/slurm_grpo/jobs/batch.py" in said
    assert "CHANGED" not in said


@pytest.mark.slow
def test_waiting_ends_with_the_failing_text(submit: Submit) -> None:
    done = submit("--wait", setup="echo the module is gone; exit 3")
    assert done.returncode == ExitCode.FAILURE
    assert "the module is gone" in done.stdout
    assert re.search(r"error: job \d+: .*FAILED.*the module is gone", done.stderr, re.DOTALL)


# -- the job and its watcher -----------------------------------------------------------------------


def where_from(run_dir: str) -> dict[str, Any]:
    return {"file": slurm_grpo.__file__, "run_dir": run_dir, "torch": "torch" in sys.modules}


def fail(run_dir: str) -> dict[str, Any]:
    raise RuntimeError(f"{run_dir} is no good")


def sleep(run_dir: str) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Submitit ignores it
    time.sleep(1000)
    return {}


@pytest.fixture
def start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RunJob]]:
    """Submits a function of this file in a run's place, as a job that ends with the test."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)  # whose package must not be taken for the snapshot
    monkeypatch.setattr(executor_module, "_POLL_S", 1.0)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cfg = Config(
        run=RunConfig(name="r", runs_dir=str(tmp_path)),
        cluster=ClusterConfig(
            kind="slurm", time_limit="10", trainers=NodesConfig(partition="train")
        ),
    )

    def start(function: Callable[[str], dict[str, Any]]) -> RunJob:
        job_dir = tmp_path / "r/jobs/0"
        snapshot_package(job_dir / "code")
        return RunExecutor(job_dir, cfg).submit_run(function, tmp_path / "r")

    yield start
    cluster.cancel_all()


def test_a_job_runs_the_snapshot_wherever_it_was_submitted(
    start: Callable[..., RunJob], tmp_path: Path
) -> None:
    result = start(where_from).result()
    assert result["file"] == str(tmp_path / "r/jobs/0/code/slurm_grpo/__init__.py")
    assert result["run_dir"] == str(tmp_path / "r")


def test_the_result_of_a_failed_job_raises_its_traceback(
    cluster: Cluster, start: Callable[..., RunJob], tmp_path: Path
) -> None:
    job = start(fail)
    with pytest.raises(UncompletedJobError, match=f"RuntimeError: {tmp_path}/r is no good"):
        job.result()
    cluster.wait_state(job.job_id, "FAILED")  # its leader has; the other component is to follow
    assert job.state == "FAILED"


@pytest.mark.parametrize("component", ["leader", "whole job while pending"])
def test_the_result_of_a_killed_job_raises_instead_of_waiting(
    component: str, cluster: Cluster, start: Callable[..., RunJob]
) -> None:
    job = start(sleep)
    if component == "leader":
        cluster.wait_state(job.job_id, "RUNNING")
    cluster.run("scancel", job.job_id)
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()


def test_a_requeued_job_is_not_over_and_its_former_result_not_final(
    cluster: Cluster, start: Callable[..., RunJob], tmp_path: Path
) -> None:
    job = start(sleep)
    cluster.wait_state(job.job_id, "RUNNING")
    job.paths.result_pickle.write_bytes(cloudpickle.dumps(("success", {"status": "stopped"})))
    assert not job.done(force_check=True)
    cluster.run("scontrol", "requeue", job.job_id)
    cluster.wait_state(job.job_id, "PENDING")
    cluster.wait_state(job.job_id, "RUNNING")
    assert not job.done(force_check=True)
    wait_until(lambda: not job.paths.result_pickle.exists(), 120, "the former result's end")
    cluster.run("scancel", job.job_id)
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()
