"""Steps on Slurm: one srun for an engine, one for all trainer ranks.

Each srun is a child process of the supervisor with a lifeline through its standard input, and
speaks through its output file: `task_entry.py`, at the other end, reports there how each process
ended. srun's own words count for tasks that could not report, since of many tasks its exit code
tells only the highest. Knows nothing about what the processes do, nor when a job comes back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_grpo.config.schema import Config
from slurm_grpo.control.address import address_of, host_address
from slurm_grpo.fsio import write_durably
from slurm_grpo.jobs import task_entry
from slurm_grpo.jobs.requeue import end_leftover_steps, why_told_to_end
from slurm_grpo.run.directory import AttemptDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.run.versions import PACKAGE_ROOT
from slurm_grpo.slurm.allocation import Allocation
from slurm_grpo.slurm.placement import Seat, place
from slurm_grpo.slurm.queue import expand_indices
from slurm_grpo.slurm.script import Flags, adjusted, gpu_flags, node_groups
from slurm_grpo.slurm.submit_env import clean_environment
from slurm_grpo.supervisor.steps import LocalStep, Step, StepLauncher, StepSpec, start_local

log = logging.getLogger(__name__)

_KILL_S = 3.0
"""Seconds tasks have to report their end once the lifeline is cut; then srun is killed, and Slurm
kills them."""
_LOST = -9
_SRUN_ERROR = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+))?")
"""What srun says of tasks that end badly; one that has reported its role's end does not."""
_FOR_SRUN = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_WORKING_CLUSTER")
"""All it needs to find the allocation. The others are defaults for flags, some of which contradict
ours, and in component 1 some are component 0's."""


class SrunLauncher(StepLauncher):
    """Starts steps in the allocation around this process."""

    poll_s = 1.0
    on_this_host = False

    def __init__(self, cfg: Config, allocation: Allocation) -> None:
        """Raises ConfigError when the processes do not fit the allocation."""
        self._cfg = cfg
        self._allocation = allocation
        self._seats = place(cfg, allocation.hosts)
        self._sruns: list[_Srun] = []
        self._attempt: AttemptDir
        interface = cfg.site.interface
        self.control_host = host_address() if interface is None else address_of(interface)

    @property
    def facts(self) -> dict[str, Any]:
        def nodes(role: str) -> list[str]:
            seats = {p: s.host for p, s in self._seats.items() if p.startswith(role)}
            return list(dict.fromkeys(seats.values()))

        return {
            "job_id": self._allocation.reference,
            "restart_count": self._allocation.restart_count,
            "nodes": {"generators": nodes("engine-"), "trainers": nodes("trainer-")},
        }

    def prepare(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        if self._allocation.restart_count:
            end_leftover_steps(self._allocation)

    def start(self, specs: Sequence[StepSpec]) -> dict[str, Step]:
        self._reap()
        name = specs[0].peer if len(specs) == 1 else specs[0].peer.rpartition("-")[0] + "s"
        seats = [self._seats[spec.peer] for spec in specs]
        # A new name for each incarnation: a node may remember what an old name held.
        incarnation = specs[0].env["SLURM_GRPO_INCARNATION"]
        tasks = self._attempt.root / f"{name}.{incarnation}.tasks.json"
        described = {
            key: self._task(spec, specs) for key, spec in zip(_seat_keys(seats), specs, strict=True)
        }
        write_durably(tasks, json.dumps(described).encode(), mode=0o600)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _FOR_SRUN or name.startswith("SLURM_JOB_ID_HET_GROUP_")
        }
        # The supervisor's GPUs are its node's alone.
        common = {k: v for k, v in specs[0].env.items() if k != "CUDA_VISIBLE_DEVICES"}
        process = StepSpec(
            peer=f"srun-{name}",
            argv=srun_command(self._cfg, self._allocation, name, seats, tasks),
            env={**common, **environment},
            log=self._attempt.log(f"srun-{name}"),
            exit_file=self._attempt.exit_code(f"srun-{name}"),
        )
        for spec in specs:
            spec.exit_file.unlink(missing_ok=True)  # of an earlier incarnation
        srun = _Srun(process, [spec.peer for spec in specs])
        self._sruns.append(srun)
        return {spec.peer: SrunTask(spec, srun, self._seats[spec.peer].host) for spec in specs}

    def told_to_end(self) -> bool:
        told = [srun.take_told() for srun in self._sruns]
        return any(told)

    def why_told(self) -> tuple[Ending, str]:
        return why_told_to_end(self._allocation)

    def close(self) -> None:
        """Wait for the sruns, which end after their tasks; kill those that do not."""
        deadline = time.monotonic() + _KILL_S
        while self._sruns and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.05)
        for srun in self._sruns:
            srun.kill_at_once()
            log.warning("%s did not end by itself; its log: %s", srun.name, srun.log)

    def _task(self, spec: StepSpec, specs: Sequence[StepSpec]) -> dict[str, Any]:
        """What `task_entry.py` needs to know about one process."""
        seat, site = self._seats[spec.peer], self._cfg.site
        # Not left to srun: a container image has variables of its own, which win there.
        inherited = clean_environment(os.environ)
        own = {
            name: value
            for name, value in spec.env.items()
            if inherited.get(name) != value or any(s.env.get(name) != value for s in specs)
        }
        if "LOCAL_RANK" in spec.env:
            own |= {name: spec.env[name] for name in ("RANK", "WORLD_SIZE")}
            own["LOCAL_RANK"] = str(seat.local_rank)
        return {
            "peer": spec.peer,
            "argv": spec.argv,
            "env": own,
            "log": str(spec.log),
            "exit_file": str(spec.exit_file),
            "gpus": seat.gpus,
            "interface": site.interface,
            "scratch_dir": site.scratch_dir,
        }

    def _reap(self) -> None:
        self._sruns = [srun for srun in self._sruns if not srun.is_over()]


class SrunTask:
    """One process of a step."""

    def __init__(self, spec: StepSpec, srun: _Srun, host: str) -> None:
        self.spec = spec
        self._srun = srun
        self._host = host

    @property
    def pid(self) -> int:
        return self._srun.pid

    @property
    def where(self) -> str:
        return f" on {self._host}"

    @property
    def log(self) -> Path:
        with contextlib.suppress(FileNotFoundError):
            if self.spec.log.stat().st_size:
                return self.spec.log
        return self._srun.log

    def poll(self) -> int | None:
        return self._srun.exit_of(self.spec.peer)

    def terminate(self) -> None:
        self._srun.kill()

    def kill(self) -> None:
        self._srun.kill()


class _Srun:
    """An srun process, its lifeline, and what its tasks reported."""

    def __init__(self, spec: StepSpec, peers: Sequence[str]) -> None:
        self._peers = peers
        self._exits: dict[str, int] = {}
        self._n_told = 0
        self._kill_at: float | None = None
        self._offset = spec.log.stat().st_size if spec.log.exists() else 0
        reader, self._lifeline = os.pipe()
        try:
            self._process: LocalStep = start_local(spec, stdin=reader)
        finally:
            os.close(reader)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, task_entry.GREETING)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return self._process.spec.peer

    @property
    def log(self) -> Path:
        return self._process.spec.log

    def exit_of(self, peer: str) -> int | None:
        """The exit code of a task, None while it runs."""
        self._look()
        return self._exits.get(peer)

    def is_over(self) -> bool:
        if self._process.poll() is None:
            return False
        self._cut()
        return True

    def take_told(self) -> bool:
        """Whether a task was told to end since this was last asked."""
        told, self._n_told = self._n_told, 0
        return told > 0

    def kill(self) -> None:
        """Cut the lifeline: every task kills its process and reports."""
        self._cut()
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _KILL_S
        self._look()

    def kill_at_once(self) -> None:
        self._cut()
        self._process.kill()

    def _cut(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _look(self) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._process.kill()
        code = self._process.poll()  # before the log is read: it is complete then
        with self.log.open("rb") as file:
            file.seek(self._offset)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            _, notice, body = line.partition(task_entry.NOTICE)  # srun may have labelled it
            if notice:
                self._take(body)
            elif match := _SRUN_ERROR.match(line):
                for task in expand_indices(match[1]):
                    if task < len(self._peers):
                        self._exits.setdefault(self._peers[task], int(match[2] or _LOST))
        if code is not None and self._exits.keys() < set(self._peers):
            # No report at all: srun itself failed. Some: the silent tasks were killed.
            code = code if code and not self._exits else _LOST
            for peer in self._peers:
                # 128 and a signal's number, as a shell has it; 255 is none.
                self._exits.setdefault(peer, 128 - code if 128 < code <= 192 else code)

    def _take(self, body: str) -> None:
        """A task's notice; whatever somebody else wrote into the same line is left out."""
        try:
            notice, _ = json.JSONDecoder().raw_decode(body)
            peer, code, told = (notice.get(name) for name in ("peer", "exit", "told"))
        except (ValueError, AttributeError):
            log.warning("%s: a notice that cannot be read: %r", self.log, body)
            return
        if peer in self._peers and isinstance(code, int):
            self._exits.setdefault(peer, code)
        self._n_told += isinstance(told, int)


def srun_command(
    cfg: Config, allocation: Allocation, name: str, seats: Sequence[Seat], tasks: Path
) -> tuple[str, ...]:
    """The srun that starts a task for each seat of one component; pure.

    Steps overlap: each may use all that the job has on its nodes, and none waits for another.
    Processes share a node by their numbers of threads and by the GPUs that their seats name.
    """
    component, site = seats[0].component, cfg.site
    nodes = list(node_groups(cfg).values())[component]
    hosts = [seat.host for seat in seats]
    flags: Flags = {
        "job-name": name,
        "nodes": str(len(set(hosts))),
        "ntasks": str(len(seats)),
        "nodelist": ",".join(hosts),
        "cpus-per-task": str(_cpus_per_task(allocation, component, hosts)),
        "overlap": None,
        "mem": "0",  # all that the job has there
        "mpi": site.mpi,
        "export": "ALL",  # of srun's own environment, which is ours
        "kill-on-bad-exit": "0",  # or the killed hide who failed first
        "wait": "0",
    }
    if len(allocation.components) > 1:
        flags["het-group"] = str(component)
    if len(seats) > 1:
        flags["distribution"] = "arbitrary"  # else Slurm sorts the hosts, and spreads evenly
    if site.mem_flag == "none":
        del flags["mem"]
    if site.cpu_bind is not None:
        flags["cpu-bind"] = site.cpu_bind
    # Of each node's GPUs a task uses those that its seat names. No --gpu-bind, whose `none` makes
    # Slurm set no CUDA_VISIBLE_DEVICES.
    flags |= gpu_flags(nodes, site) | _container_flags(cfg, tasks)
    flags = adjusted(flags, site.remove_flags, site.srun_flags)
    words = [f"--{n}" if value is None else f"--{n}={value}" for n, value in flags.items()]
    prefix = site.container_prefix if site.container == "prefix" else ()
    if site.container != "none":  # whose image may have a PYTHONPATH, or know nothing of ours
        prefix = (*prefix, "env", f"PYTHONPATH={PACKAGE_ROOT}")
    python = cfg.cluster.python or sys.executable
    return ("srun", *words, *prefix, python, "-m", task_entry.__name__, str(tasks))


def _cpus_per_task(allocation: Allocation, component: int, hosts: Sequence[str]) -> int:
    """An equal share for the tasks of the step, on the node where it is smallest."""
    of = allocation.components[component]
    return min(
        max(1, n_cpus // hosts.count(host))
        for host, n_cpus in zip(of.hosts, of.cpus, strict=True)
        if host in hosts
    )


def _container_flags(cfg: Config, tasks: Path) -> Flags:
    site = cfg.site
    if site.container != "pyxis" or site.container_image is None:
        return {}
    run_dir = tasks.parent.parent.parent
    own = (f"{path}:{path}" for path in (run_dir, PACKAGE_ROOT))
    return {
        "container-image": site.container_image,
        "container-mounts": ",".join((*own, *site.container_mounts)),
    }


def _seat_keys(seats: Sequence[Seat]) -> list[str]:
    """By what a task finds itself in the step's file: its node, and its number there."""
    hosts = [seat.host for seat in seats]
    return [f"{host}/{hosts[:i].count(host)}" for i, host in enumerate(hosts)]
