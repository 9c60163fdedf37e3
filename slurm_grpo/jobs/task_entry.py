"""What Slurm starts for each task of a step: find out which process this is, and be its parent.

`srun_steps.py` starts it with the file of the step's tasks; it looks itself up by node and local
id, whatever order Slurm put the nodes in. It adds to the role's environment what only the node can
say, runs the role as its child, and tells the supervisor through srun's output how that ended.

Its standard input is a lifeline from the supervisor: once that is cut, the role and everything
below it is killed, whatever Slurm's process tracking misses. SIGTERM is reported and otherwise
ignored, by the role too: what it means, Slurm knows, and the supervisor asks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_grpo.control.address import address_of, host_address, interface_of
from slurm_grpo.errors import ConfigError, ExitCode, SlurmGrpoError
from slurm_grpo.fsio import read_whole, write_durably
from slurm_grpo.peers import LEADER
from slurm_grpo.run.directory import AttemptDir
from slurm_grpo.run.versions import installed_versions
from slurm_grpo.slurm.submit_env import clean_environment
from slurm_grpo.supervisor.environment import visible_gpus
from slurm_grpo.supervisor.signals import SignalInbox
from slurm_grpo.supervisor.steps import LocalStep, StepSpec, start_local

NOTICE = "slurm_grpo-task "
"""Begins the lines meant for the supervisor; a JSON object with `peer` follows, and `exit` (a code)
or `told` (to end)."""
GREETING = b"alive\n"
"""What the lifeline carries first. Only one that has worked can be cut."""


def main(path: str) -> int:
    """Run this task of the step described in `path`; 0 once its end has been reported.

    Anything else, srun reports itself, and the supervisor reads that.
    """
    tasks = json.loads(read_whole(Path(path)))
    task = tasks[f"{os.environ['SLURMD_NODENAME']}/{os.environ['SLURM_LOCALID']}"]
    try:
        if task["peer"] == LEADER:
            versions = json.dumps(installed_versions(), indent=2).encode()
            write_durably(AttemptDir(Path(path).parent).versions, versions)
        spec = StepSpec(
            peer=task["peer"],
            argv=tuple(task["argv"]),
            env=clean_environment(os.environ) | task["env"] | node_environment(task, os.environ),
            log=Path(task["log"]),
            exit_file=Path(task["exit_file"]),
        )
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # stays so in the role, over exec
        code = _watch(start_local(spec))
    except SlurmGrpoError as error:
        sys.stderr.write(f"{task['peer']}: {error}\n")
        code = error.exit_code
    _notify(task["peer"], exit=code)
    return ExitCode.OK


def node_environment(task: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Variables that only this node can give values to.

    Raises ConfigError when site.interface has no address here, or GPUs are missing.
    """
    if task["interface"] is None:
        address = host_address()
        # Left alone, gloo listens where the host name resolves to, which may be loopback.
        interface = env.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        found = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    else:
        address, found = address_of(task["interface"]), {}
    found["SLURM_GRPO_HOST_ADDRESS"] = address
    scratch = tempfile.gettempdir()
    if task["scratch_dir"] is not None:
        scratch = found["TMPDIR"] = os.path.expandvars(task["scratch_dir"])
        os.makedirs(scratch, exist_ok=True)
    if not task["peer"].startswith("engine-"):  # an engine makes caches of its own in TMPDIR
        cache = Path(scratch) / f"slurm_grpo_{os.getuid()}"
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            found[name] = env.get(name, str(cache / name.lower()))
    if task["gpus"]:
        gpus = visible_gpus(env)
        if max(task["gpus"]) >= len(gpus):
            raise ConfigError(
                f"{env.get('SLURMD_NODENAME')}: the seat is GPU {task['gpus']} of the node, from "
                f"0, but the step has {len(gpus)} ({','.join(gpus)}). Compare gpus_per_node with "
                "what Slurm grants, and see site.gpu_flag."
            )
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i] for i in task["gpus"])
    return found


def _watch(step: LocalStep) -> int:
    lifeline, is_armed, n_told = sys.stdin.fileno(), False, 0
    with SignalInbox(step.kill) as signals:
        while (code := step.poll()) is None:
            signals.wait(5.0, *([] if lifeline < 0 else [lifeline]))
            if signals.stop_signal is not None:
                signals.stop_signal = None
                n_told += 1
                _notify(step.spec.peer, told=n_told)
            if lifeline >= 0 and (received := _read(lifeline)) is not None:
                is_armed = is_armed or bool(received)
                if not received:
                    lifeline = -1
                    if is_armed:
                        step.kill()
    return code


def _read(fd: int) -> bytes | None:
    """What has arrived; empty at the end, None when there is nothing yet."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return None


def _notify(peer: str, **event: int) -> None:
    sys.stdout.write(f"{NOTICE}{json.dumps({'peer': peer, **event})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(ExitCode.CONFIG)
    sys.exit(main(sys.argv[1]))
