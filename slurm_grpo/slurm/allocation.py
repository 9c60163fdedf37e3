"""What this job is: its ids, how often it was restarted, and the hosts and CPUs of its components.

Read once from the batch step's environment. Host lists are expanded here: `scontrol show hostnames`
would be a process, and a union list is sorted. Knows nothing of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_grpo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One homogeneous part of the job."""

    job_id: str
    """Its own, by which its steps are listed."""
    hosts: tuple[str, ...]
    """Slurm's names, which need not resolve."""
    cpus: tuple[int, ...]
    """CPUs of the job on each host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The job around this process."""

    job_id: str
    """The leader's."""
    reference: str
    """What `squeue` and `scontrol requeue` are to be told: an array element is `12_3`, since the
    first one's own id is also the whole array's."""
    restart_count: int
    components: tuple[Component, ...]
    """One, or generators and trainers of a heterogeneous job."""

    @property
    def hosts(self) -> list[tuple[str, ...]]:
        return [component.hosts for component in self.components]


def read_allocation(env: Mapping[str, str] = os.environ) -> Allocation:
    """The job that this batch step belongs to. Raises ConfigError outside of one."""
    job_id = env.get("SLURM_JOB_ID")
    if job_id is None:
        raise ConfigError(
            "cluster.kind: slurm, but this is no batch step (SLURM_JOB_ID is not set). Submit the "
            "run with launch/submit.py, or choose --cluster.kind local."
        )
    task = env.get("SLURM_ARRAY_TASK_ID")
    suffixes = [f"_HET_GROUP_{k}" for k in range(int(env.get("SLURM_HET_SIZE", "0")))] or [""]
    return Allocation(
        job_id=job_id,
        reference=job_id if task is None else f"{env['SLURM_ARRAY_JOB_ID']}_{task}",
        restart_count=int(env.get("SLURM_RESTART_COUNT", "0")),
        components=tuple(
            Component(
                job_id=env.get(f"SLURM_JOB_ID{suffix}", str(int(job_id) + k)),
                hosts=tuple(expand_hosts(env[f"SLURM_JOB_NODELIST{suffix}"])),
                cpus=tuple(expand_counts(env[f"SLURM_JOB_CPUS_PER_NODE{suffix}"])),
            )
            for k, suffix in enumerate(suffixes)
        ),
    )


def expand_hosts(text: str) -> list[str]:
    """`gen[1-2],x[08-10]-ib` to gen1, gen2, x08-ib, x09-ib, x10-ib."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts += _expand_brackets(part)
    return hosts


def expand_counts(text: str) -> list[int]:
    """`4(x2),8` to 4, 4, 8."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _expand_brackets(name: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if match is None:
        return [name]
    numbers = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    rest = _expand_brackets(name[match.end() :])
    return [f"{name[: match.start()]}{number}{end}" for number in numbers for end in rest]
