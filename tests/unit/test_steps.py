"""Local steps: output, exit codes, and that nothing survives what it should not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_grpo import proctree
from slurm_grpo.config import Config, GeneratorConfig, ModelConfig, TrainerConfig
from slurm_grpo.rundir import RunDir
from slurm_grpo.slurm.environment import assign_gpus, role_environment, visible_gpus
from slurm_grpo.slurm.steps import LocalStep, StepSpec, start_local

ROOT = Path(__file__).resolve().parents[2]


def spec(tmp_path: Path, *argv: str) -> StepSpec:
    return StepSpec(
        peer="engine-0",
        argv=argv,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        log=tmp_path / "engine-0.log",
        exit_file=tmp_path / "engine-0.exit",
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def wait_for_end(step: LocalStep, timeout_s: float = 10.0) -> int:
    deadline = time.monotonic() + timeout_s
    while (code := step.poll()) is None:
        assert time.monotonic() < deadline, "the step did not end"
        time.sleep(0.01)
    return code


def wait_for_line(path: Path, timeout_s: float = 10.0) -> str:
    """The first whole line a process wrote into a file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or "\n" not in path.read_text():
        assert time.monotonic() < deadline, f"nothing in {path}"
        time.sleep(0.01)
    return path.read_text().splitlines()[0]


def wait_until_gone(*pids: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if proctree.start_ticks(pid) is not None]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


def test_output_is_appended_and_the_exit_code_is_recorded(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        step = start_local(spec(tmp_path, *python(code)))
        assert wait_for_end(step) == 3
    assert (tmp_path / "engine-0.exit").read_text() == "3\n"
    lines = (tmp_path / "engine-0.log").read_text().split()
    assert sorted(lines) == ["err", "err", "out", "out"]


def test_a_step_killed_by_a_signal_records_its_negative_number(tmp_path: Path) -> None:
    step = start_local(spec(tmp_path, *python("import time; time.sleep(60)")))
    step.kill()
    assert wait_for_end(step) == -signal.SIGKILL
    assert (tmp_path / "engine-0.exit").read_text() == "-9\n"


def test_terminate_after_an_unseen_end_is_harmless(tmp_path: Path) -> None:
    step = start_local(spec(tmp_path, *python("raise SystemExit(4)")))
    os.waitid(os.P_PID, step.pid, os.WEXITED | os.WNOWAIT)
    step.terminate()
    assert step.poll() == 4
    step.terminate()
    step.kill()
    assert step.poll() == 4


def test_a_program_that_does_not_exist_ends_with_a_reason_in_the_log(tmp_path: Path) -> None:
    step = start_local(spec(tmp_path, "/no/such/python"))
    assert wait_for_end(step) == 1
    log = (tmp_path / "engine-0.log").read_text()
    assert log == "cannot start /no/such/python: No such file or directory\n"


@pytest.mark.parametrize("session", ["same", "own"])
def test_kill_reaches_children_in_this_session_and_in_their_own(
    tmp_path: Path, session: str
) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session={session == "own"})
print(child.pid, flush=True)
time.sleep(60)
"""
    step = start_local(spec(tmp_path, *python(code)))
    child = int(wait_for_line(tmp_path / "engine-0.log"))
    step.kill()
    wait_for_end(step)
    wait_until_gone(child)


def test_what_a_crashed_step_leaves_in_its_session_is_removed(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
os._exit(1)
"""
    step = start_local(spec(tmp_path, *python(code)))
    assert wait_for_end(step) == 1
    wait_until_gone(int(wait_for_line(tmp_path / "engine-0.log")))


def test_a_step_dies_with_its_killed_starter_even_if_it_ignores_term(tmp_path: Path) -> None:
    role = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    starter = f"""
import os, sys, time
from pathlib import Path
from slurm_grpo.slurm.steps import StepSpec, start_local
here = Path({str(tmp_path)!r})
start_local(StepSpec(peer="engine-0", argv=(sys.executable, "-c", {role!r}),
                               env=dict(os.environ), log=here / "log", exit_file=here / "exit"))
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", starter], env=env)
    pid = int(wait_for_line(tmp_path / "log"))
    process.kill()
    process.wait()
    wait_until_gone(pid)


def config(n_engines: int = 1, tensor_parallel: int = 1, n_ranks: int = 1) -> Config:
    from dataclasses import replace

    generator = GeneratorConfig(n_engines=n_engines)
    engine = replace(generator.engine, tensor_parallel=tensor_parallel)
    return Config(
        model=ModelConfig(path="m"),
        generator=replace(generator, engine=engine, threads=3),
        trainer=TrainerConfig(n_ranks=n_ranks, threads=5),
    )


def environment(base: dict[str, str], peer: str, cfg: Config, root: Path) -> dict[str, str]:
    return role_environment(
        base, cfg, RunDir(root), attempt=2, peer=peer, incarnation=1, control="tcp://127.0.0.1:1"
    )


def test_leftovers_of_a_surrounding_job_do_not_reach_a_role(tmp_path: Path) -> None:
    base = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/etc/slurm.conf",
        "PMI_RANK": "3",
        "MASTER_ADDR": "elsewhere",
        "RANK": "9",
        "WANDB_SERVICE": "x",
        "PYTHONPATH": "/mine",
    }
    env = environment(base, "engine-1", config(n_engines=2), tmp_path)
    assert env == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "PYTHONPATH": f"{ROOT}:/mine",
        "SLURM_GRPO_HOST_ADDRESS": "127.0.0.1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "SLURM_GRPO_RUN_DIR": str(tmp_path.resolve()),
        "SLURM_GRPO_ATTEMPT": "2",
        "SLURM_GRPO_PEER": "engine-1",
        "SLURM_GRPO_INCARNATION": "1",
        "SLURM_GRPO_CONTROL": "tcp://127.0.0.1:1",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "HDF5_USE_FILE_LOCKING": "FALSE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_trainer_rank_is_told_its_rank_and_its_threads(tmp_path: Path) -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": ""}, "trainer-1", config(n_ranks=2), tmp_path)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("1", "1", "2")
    assert env["OMP_NUM_THREADS"] == "5"


def test_engines_get_their_own_gpus_and_trainers_share_the_rest() -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7,8,9"})
    cfg = config(n_engines=2, tensor_parallel=2, n_ranks=2)
    peers = ("engine-0", "engine-1", "trainer-0", "trainer-1")
    assert [assign_gpus(gpus, cfg, peer) for peer in peers] == [
        ["4", "5"],
        ["6", "7"],
        ["8", "9"],
        ["8", "9"],
    ]
    assert assign_gpus(["0"], cfg, "engine-1") == ["0"]
