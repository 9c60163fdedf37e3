"""Whole runs for integration tests: write a config, launch it as a user would, read the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import read_metrics
from slurm_grpo.staging.verify import verify_run

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

TINY: dict[str, Any] = {
    "run": {"steps": 3},
    "task": {
        "name": "jsonl",
        "scorer": {"name": "reward_functions:share_of_low_bytes"},
    },
    "evaluation": {"n_prompts": 8},
    "algorithm": {"groups_per_step": 4, "group_size": 4},
    "generator": {
        "engine": {
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "kv_cache_gib": 0.05,
        },
        "sampling": {"max_new_tokens": 12},
        "threads": 1,
        "restart_backoff_s": 0.1,
    },
    "trainer": {
        "forward_dtype": "float32",
        "tokens_per_microbatch": 256,
        "threads": 1,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every_steps": 2, "export_hf": False},
    },
    "weight_sync": {"bucket_mib": 1, "transfer_timeout_s": 20, "door_timeout_s": 60},
    "cluster": {"start_timeout_s": 400},
}


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = merge(base.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def write_config(folder: Path, model: Path, changes: dict[str, Any] | None = None) -> Path:
    """A tiny run's config file with its own prompt rows; runs go to `folder/runs/test`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": f"row {i}: {i * 37 % 101} ->", "answer": i}) for i in range(64)]
    rows.write_text("\n".join(lines) + "\n")
    fixed = {
        "run": {"name": "test", "runs_dir": str(folder / "runs")},
        "model": {"path": str(model)},
        "task": {"path": str(rows), "eval_path": str(rows)},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merge(merge(TINY, fixed), changes or {})))
    return path


def start(*arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
    """`python launch/submit.py ARGUMENTS` in a session of its own, output to `log`."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch" / "submit.py"), *map(str, arguments)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Exit code; a run that takes longer is ended and fails the test."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        raise


def launch(config: Path, *overrides: str, timeout_s: float = 240.0) -> RunDir:
    """Run to the end; the test fails with the logs when it does not."""
    run = RunDir(config.parent / "runs" / "test")
    log = config.parent / "submit.log"
    code = finish(start(config, *overrides, log=log), timeout_s)
    assert code == 0, explain(run, log)
    return run


def resume(run: RunDir, *overrides: str, timeout_s: float = 240.0) -> None:
    """Continue to the end."""
    log = run.root.parent.parent / "resume.log"
    code = finish(start("--resume", run.root, *overrides, log=log), timeout_s)
    assert code == 0, explain(run, log)


def assert_whole(folder: Path) -> None:
    """No run below `folder` has lost, damaged or twice trained an episode."""
    for config in folder.rglob("config.yaml"):
        run = RunDir(config.parent)
        if run.episodes.is_dir():
            findings = verify_run(run)
            assert not findings, "\n".join([f"{run.root}:", *findings])


def explain(run: RunDir, log: Path) -> str:
    """Everything a failed run wrote that fits on a few screens."""
    parts = [log.read_text(errors="replace")[-4000:]]
    for path in sorted(run.attempts.glob("*/*.log")):
        parts.append(f"--- {path}\n{path.read_text(errors='replace')[-4000:]}")
    return "\n".join(parts)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def step_rows(run: RunDir) -> list[dict[str, Any]]:
    """The trainer's rows of training steps, in file order."""
    return [r for r in read_metrics(run.metrics_file("trainer")) if "trainer/loss" in r]


def summary(run: RunDir) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run.summary.read_text())
    return loaded
