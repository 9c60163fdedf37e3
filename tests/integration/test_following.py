"""Following and cancelling a run on this machine, with a real supervisor and fake roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import ROOT, TESTS, wait_until
from slurm_grpo.commands.main import main
from slurm_grpo.config.loading import freeze_config
from slurm_grpo.config.schema import ClusterConfig, Config, GeneratorConfig, ModelConfig, RunConfig
from slurm_grpo.errors import ExitCode
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.state import live_supervisor_here, stand


def test_a_local_run_is_seen_at_work_and_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    cfg = Config(
        model=ModelConfig(path="none"),
        run=RunConfig(name="r", steps=1000),
        generator=GeneratorConfig(threads=1, restart_backoff_s=0.05),
        cluster=ClusterConfig(stop_grace_s=2),
    )
    freeze_config(cfg, run.config)
    orders = {"engine-0": {"die_after": 20, "incarnations": 1}, "trainer-0": {"step_s": 0.05}}
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "fakes", "supervise", str(run.root)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{TESTS}",
            "FAKE_ROLES": json.dumps(orders),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: status(run, capsys)["engine_restarts"] == 1, 120, "an engine's restart")
        report = status(run, capsys)
        assert report["state"] == "running"
        assert report["job"] is None
        assert "engine-0 ended (exit code 1" in report["warnings"][0]
        assert live_supervisor_here(run) == supervisor.pid
        assert main(["cancel", str(run.root)]) == ExitCode.OK
        assert capsys.readouterr().out == f"{run.root}: cancelled.\n"
        assert live_supervisor_here(run) is None
        assert supervisor.wait(60) == 128 + 15
        assert stand(run).word == "interrupted"
    finally:
        supervisor.kill()
        supervisor.wait()


def status(run: RunDir, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(run.root), "--json"]) == ExitCode.OK
    return dict(json.loads(capsys.readouterr().out))
