"""The supervisor with real processes and the real control plane; only the work inside the roles is
fake."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import wait_until
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import (
    ClusterConfig,
    Config,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from slurm_grpo.errors import ExitCode
from slurm_grpo.run import proctree
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import read_run_metrics
from slurm_grpo.supervisor.supervisor import MAX_END_S

ROOT = Path(__file__).resolve().parents[2]

CONFIG = Config(
    model=ModelConfig(path="none"),
    run=RunConfig(name="r", steps=4),
    generator=GeneratorConfig(n_engines=2, threads=1, restart_backoff_s=0.05, max_restarts=2),
    trainer=TrainerConfig(threads=1),
    cluster=ClusterConfig(start_timeout_s=30, heartbeat_timeout_s=30, stop_grace_s=2),
)


class Supervised:
    """A supervisor process and its run directory."""

    def __init__(self, run: RunDir, cfg: Config, orders: dict[str, Any]) -> None:
        self.run = run
        run.create()
        freeze_config(cfg, run.config)
        self.output = run.root / f"output-{len(run.attempt_numbers())}.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fakes", "supervise", str(run.root)],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                    "FAKE_ROLES": json.dumps(orders),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)

    def wait_for_steps(self, n_steps: int = 1) -> None:
        """Until the trainer has taken so many steps."""
        deadline = time.monotonic() + 120
        while len(self.steps()) < n_steps:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in read_run_metrics(self.run, "trainer") if "trainer/step_s" in row]

    def roles(self) -> list[int]:
        """Pids of the processes the supervisor started."""
        return sorted(proctree.descendants(self.process.pid) - {self.process.pid})

    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.run.summary.read_text()))

    def text(self) -> str:
        return self.output.read_text()


@contextmanager
def supervised(
    tmp_path: Path, cfg: Config = CONFIG, orders: dict[str, Any] | None = None
) -> Iterator[Supervised]:
    started = Supervised(RunDir(tmp_path / "r"), cfg, orders or {})
    pids = set(started.roles())
    try:
        yield started
    finally:
        pids |= set(started.roles())
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
    assert_gone(pids)


def assert_gone(pids: set[int], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := {pid for pid in pids if proctree.start_ticks(pid) is not None}:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.02)


def test_a_run_ends_by_itself_with_its_books_in_order(tmp_path: Path) -> None:
    with supervised(tmp_path) as s:
        assert s.wait() == ExitCode.OK, s.text()
        attempt = s.run.attempt(0)
        for peer in ("engine-0", "engine-1", "trainer-0"):
            assert attempt.exit_code(peer).read_text() == "0\n"
            assert attempt.log(peer).exists()
        assert json.loads(attempt.versions.read_text()).keys() >= {"python", "slurm_grpo", "torch"}
        summary = s.summary()
        assert (summary["status"], summary["steps"], summary["error"]) == ("done", 4, None)
        evaluated = {"metric": "accuracy", "before": 0.25, "after": 0.75}
        assert summary["eval"] == {"held_out": evaluated}
        assert 1e6 < summary["peak_pss_bytes"] < 4e9
        assert 0 < summary["wall_s"] < 120
        assert [row["groups"] for row in s.steps()] == [8] * 4
        lines = s.text().splitlines()
        assert sum(bool(re.search(r"step \d/4", line)) for line in lines) == 4
        assert (s.run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
        assert not (s.run.root / "supervisor.lock").exists()


def test_a_killed_supervisor_leaves_no_role_process(tmp_path: Path) -> None:
    orders = {"engine-0": {"ignore_term": True}, "trainer-0": {"hang_at": 2, "ignore_term": True}}
    with supervised(tmp_path, orders=orders) as s:
        s.wait_for_steps(1)
        roles = set(s.roles())
        assert len(roles) == 3
        s.process.kill()
        s.process.wait()
        assert_gone(roles)
        assert json.loads((s.run.attempt(0).root / "supervisor.json").read_text())["wall_s"] >= 0


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGTERM, 60.0), (signal.SIGINT, 4.0)])
def test_a_signal_ends_everything_in_ten_seconds_even_roles_that_ignore_it(
    tmp_path: Path, number: int, grace_s: float
) -> None:
    cfg = replace(CONFIG, cluster=replace(CONFIG.cluster, stop_grace_s=grace_s))
    orders = {"engine-1": {"ignore_term": True}, "trainer-0": {"hang_at": 2, "ignore_term": True}}
    with supervised(tmp_path, cfg, orders) as s:
        s.wait_for_steps(1)
        roles = set(s.roles())
        started = time.monotonic()
        s.process.send_signal(number)
        assert_gone(roles, timeout_s=10)
        assert s.wait() == 128 + number
        assert time.monotonic() - started < 10
        assert s.summary()["status"] == "interrupted"
        assert s.run.attempt(0).exit_code("engine-0").read_text() == "0\n"
        assert s.run.attempt(0).exit_code("engine-1").read_text() == "-9\n"
        assert "--resume" in s.text()


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    cfg = replace(CONFIG, cluster=replace(CONFIG.cluster, stop_grace_s=60))
    with supervised(tmp_path, cfg, {"trainer-0": {"hang_at": 2, "ignore_term": True}}) as s:
        s.wait_for_steps(1)
        started = time.monotonic()
        s.process.send_signal(signal.SIGINT)
        wait_until(s.run.attempt(0).exit_code("engine-0").exists, 60, "the first to be seen")
        s.process.send_signal(signal.SIGINT)
        assert s.wait() == 130
        assert time.monotonic() - started < MAX_END_S  # when the first alone would have killed


def test_usr1_stops_at_the_next_step_boundary(tmp_path: Path) -> None:
    cfg = replace(CONFIG, run=replace(CONFIG.run, steps=1000))
    with supervised(tmp_path, cfg, {"trainer-0": {"step_s": 0.1}}) as s:
        s.wait_for_steps(2)
        s.process.send_signal(signal.SIGUSR1)
        assert s.wait() == ExitCode.STOPPED
        assert s.summary()["status"] == "stopped"
        assert 2 <= s.summary()["steps"] < 1000
        assert s.run.attempt(0).exit_code("trainer-0").read_text() == "0\n"


def test_a_dead_engine_is_restarted_and_the_run_ends_whole(tmp_path: Path) -> None:
    orders = {"engine-1": {"die_after": 5, "incarnations": 2, "code": 9}}
    with supervised(tmp_path, orders=orders) as s:
        assert s.wait() == ExitCode.OK, s.text()
        assert [row["groups"] for row in s.steps()] == [8] * 4
        assert s.text().count("engine-1 ended (exit code 9") == 2
        assert "restart 2 of 2" in s.text()


def test_an_engine_that_keeps_dying_fails_the_run_after_its_restarts(tmp_path: Path) -> None:
    with supervised(tmp_path, orders={"engine-1": {"die_after": 0, "code": 5}}) as s:
        assert s.wait() == ExitCode.INFRASTRUCTURE
        summary = s.summary()
        assert summary["status"] == "failed"
        assert "engine-1" in summary["error"]
        assert "after 2 restarts (generator.max_restarts)" in summary["error"]


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.SCORER, ExitCode.NON_FINITE], ids=str)
def test_an_engine_whose_exit_blames_the_user_is_not_restarted(tmp_path: Path, code: int) -> None:
    with supervised(tmp_path, orders={"engine-0": {"die_after": 2, "code": code}}) as s:
        assert s.wait() == code
        assert "restart 1" not in s.text()


def test_a_failing_trainer_rank_fails_the_run_and_its_traceback_comes_last(tmp_path: Path) -> None:
    cfg = replace(CONFIG, trainer=replace(CONFIG.trainer, n_ranks=2))
    orders = {
        "trainer-1": {"fail_at": 1, "error": "NonFiniteError"},
        "trainer-0": {"hang_at": 2, "ignore_term": True},
    }
    with supervised(tmp_path, cfg, orders) as s:
        assert s.wait() == ExitCode.NON_FINITE
        assert (
            s.text()
            .splitlines()[-1]
            .endswith("NonFiniteError: trainer-1 fails in step 1, as ordered")
        )
        assert "Traceback (most recent call last):" in s.text()
        assert s.summary()["status"] == "failed"
        assert "trainer-1 ended: exit code 3" in s.summary()["error"]


def test_a_silent_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    cluster = replace(CONFIG.cluster, heartbeat_timeout_s=6)
    cfg = replace(CONFIG, cluster=cluster, run=replace(CONFIG.run, steps=40))
    with supervised(tmp_path, cfg, {"trainer-0": {"step_s": 0.1}}) as s:
        s.wait_for_steps(1)
        by_name = {
            Path(f"/proc/{pid}/environ")
            .read_bytes()
            .split(b"SLURM_GRPO_PEER=")[1]
            .split(b"\0")[0]: pid
            for pid in s.roles()
        }
        os.kill(by_name[b"engine-1"], signal.SIGSTOP)
        assert s.wait() == ExitCode.OK, s.text()
        assert "killing engine-1" in s.text()
        assert "no heartbeat" in s.text()
        assert len(s.steps()) == 40


def test_a_second_supervisor_on_a_live_run_is_refused_by_name(tmp_path: Path) -> None:
    with supervised(tmp_path, orders={"trainer-0": {"hang_at": 2}}) as s:
        s.wait_for_steps(1)
        second = Supervised(s.run, CONFIG, {})
        assert second.wait() == ExitCode.CONFIG
        assert f"pid {s.process.pid})" in second.text()
        assert s.run.attempt_numbers() == [0]
        s.process.send_signal(signal.SIGTERM)
        s.wait()


def test_a_run_whose_supervisor_was_killed_can_be_taken_up(tmp_path: Path) -> None:
    with supervised(tmp_path, orders={"trainer-0": {"hang_at": 2}}) as first:
        first.wait_for_steps(1)
        first.process.kill()
        first.process.wait()
        second = Supervised(first.run, CONFIG, {})
        assert second.wait() == ExitCode.OK, second.text()
        assert first.run.attempt_numbers() == [0, 1]
        assert second.summary()["n_attempts"] == 2


def test_a_supervisor_with_nothing_to_do_hardly_uses_the_cpu(tmp_path: Path) -> None:
    with supervised(tmp_path, orders={"trainer-0": {"hang_at": 2}}) as s:
        s.wait_for_steps(1)
        time.sleep(1)

        def share_of_a_core() -> float:
            before = cpu_seconds(s.process.pid)
            time.sleep(4)
            return (cpu_seconds(s.process.pid) - before) / 4

        assert any(share_of_a_core() < 0.02 for _ in range(3))
        s.process.send_signal(signal.SIGTERM)
        s.wait()


def test_the_supervisor_needs_neither_torch_nor_vllm_nor_h5py() -> None:
    code = (
        "import sys, slurm_grpo.supervisor.supervisor; "
        "sys.exit(str({'torch', 'vllm', 'h5py', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "set()\n"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
