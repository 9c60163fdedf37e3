"""Sweeps on a real Slurm: an array of real runs, and what a second call submits."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_shell import make_model_shell
from runs import TESTS, wait_until
from slurm_cluster import LIVE, Cluster
from slurm_grpo.commands.main import main as slurm_grpo
from slurm_grpo.commands.sweep import main
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.state import find_run, stand
from slurm_grpo.sweeps.directory import compress
from slurm_runs import SPLIT, write_config

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(TESTS))  # where the reward function is
    monkeypatch.chdir(tmp_path)
    yield
    cluster.cancel_all()


def write_sweep(folder: Path, model: Path, n: int, changes: dict[str, Any], **split: Any) -> str:
    write_config(folder, model, changes, **split)
    path = folder / "s.yaml"
    content = {"base": "config.yaml", "grid": {"run.seed": list(range(n))}}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def live_tasks(cluster: Cluster) -> dict[str, int]:
    """Live elements by array; compact or one by one, as squeue likes."""
    found: dict[str, int] = {}
    for row in cluster.run("squeue", "--array", "-h", "-o", "%F %T").splitlines():
        array, state = row.split()
        found[array] = found.get(array, 0) + (state in LIVE)
    return found


def test_three_elements_run_as_an_array_and_only_what_is_missing_is_submitted_again(
    cluster: Cluster,
    tmp_path: Path,
    tiny_model_dir: Callable[[], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {"run": {"steps": 2}, "algorithm": {"groups_per_step": 2, "group_size": 2}}
    sweep = write_sweep(tmp_path, tiny_model_dir(), 3, changes, allocation=SPLIT)
    folder = str(tmp_path / "runs/s")
    assert main([sweep, "--submit", "--max-running", "1"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert re.search(r"submitted job array \d+: 0-2%1", said)

    assert main([sweep, "--submit"]) == ExitCode.OK
    assert "Nothing to run" in capsys.readouterr().out  # all are alive
    assert slurm_grpo(["cancel", f"{folder}/s-002"]) == ExitCode.OK
    wait_until(lambda: not cluster.live_jobs(), 600, "elements 0 and 1 to end")
    words = [stand(find_run(f"{folder}/s-00{i}")).word for i in range(3)]
    assert words == ["done", "done", "not started"], explain(tmp_path)

    capsys.readouterr()
    assert main([sweep, "--submit"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "2 done, 1 not started" in said
    assert re.search(r"submitted job array \d+: 2\n", said)
    wait_until(lambda: not cluster.live_jobs(), 400, "element 2 to end")
    assert main([sweep, "--submit"]) == ExitCode.OK
    assert "3 done\nNothing to run" in capsys.readouterr().out, explain(tmp_path)

    assert slurm_grpo(["sweep", "table", folder, "--csv", "--sort", "reward_last"]) == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rewards = [float(row["reward_last"]) for row in rows]
    assert rewards == sorted(rewards, reverse=True)
    assert {(row["status"], row["steps"]) for row in rows} == {("done", "2")}
    assert {row["run.seed"] for row in rows} == {"0", "1", "2"}


def explain(folder: Path) -> str:
    logs = sorted(folder.glob("runs/s/logs/*.out"))
    return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)


def test_elements_that_a_person_submitted_are_seen_while_they_wait(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path, make_model_shell(tmp_path / "m"), 8, {}, allocation=SPLIT)
    assert main([sweep, "--max-running", "4"]) == ExitCode.OK
    offered = re.search(r"sbatch (--array=0-7%4) (\S+array\.sh)", capsys.readouterr().out)
    assert offered is not None
    array = cluster.run("sbatch", "--parsable", "--hold", *offered.groups()).strip()
    assert main([sweep, "--submit"]) == ExitCode.OK
    assert "8 queued\nNothing to run" in capsys.readouterr().out
    assert live_tasks(cluster) == {array: 8}

    assert slurm_grpo(["sweep", "status", "s"]) == ExitCode.OK
    assert f"queued {array}_7" in capsys.readouterr().out
    assert slurm_grpo(["cancel", "s/s-003"]) == ExitCode.OK
    cluster.run("scancel", f"{array}_[5-6]")
    capsys.readouterr()
    assert main([sweep]) == ExitCode.OK
    assert "5 queued, 3 not started" in (said := capsys.readouterr().out)
    assert f"sbatch --array={compress([3, 5, 6])} " in said


def test_heterogeneous_elements_wait_for_the_one_before_them_in_their_lane(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"cluster": {"generators": {"flags": ["--hold"]}}}
    sweep = write_sweep(tmp_path, make_model_shell(tmp_path / "m"), 5, held)
    assert main([sweep, "--lanes", "2", "--submit"]) == ExitCode.OK
    jobs = re.findall(r"submitted job (\d+) in lane (\d)", capsys.readouterr().out)
    assert [int(lane) for _, lane in jobs] == [0, 1, 0, 1, 0]
    ids = [job for job, _ in jobs]
    assert [waits_for(cluster, job) for job in ids] == ["", "", ids[0], ids[1], ids[2]]
    assert main([sweep, "--lanes", "2", "--submit"]) == ExitCode.OK
    assert "5 queued\nNothing to run" in capsys.readouterr().out

    assert slurm_grpo(["cancel", "s/s-001"]) == ExitCode.OK
    capsys.readouterr()
    assert main([sweep, "--lanes", "2", "--submit"]) == ExitCode.OK
    again = re.findall(r"submitted job (\d+) in lane (\d): s-001", capsys.readouterr().out)
    assert [lane for _, lane in again] == ["1"]
    assert waits_for(cluster, again[0][0]) == ids[3]


def waits_for(cluster: Cluster, job: str) -> str:
    """The job whose end the components of this one wait for."""
    said = set(cluster.run("squeue", "-h", "-j", job, "-o", "%E").split())
    assert len(said) == 1
    return "".join(re.findall(r"afterany:(\d+)", said.pop()))
