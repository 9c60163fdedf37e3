"""From a configuration to the text of its batch script. Pure: no clock, no files, no Slurm.

Called when a run or a sweep is submitted, and by `--dry-run`. Promises that each component of a
heterogeneous job repeats what Slurm does not carry over from the first, and that every flag can be
replaced or removed by the site. Knows nothing about what the script's last command does.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from slurm_grpo.config.schema import Config, NodesConfig, SiteConfig
from slurm_grpo.slurm.placement import place

Flags = dict[str, str | None]
"""sbatch flags by long name, without dashes; None for one that takes no value."""


CODE = "code"
"""Snapshot of the package, in the directory of a submission or a sweep; goes on PYTHONPATH."""


def submitit_command(job_dir: Path) -> str:
    """What a single job runs: Submitit's entry, which finds its pickle in `job_dir`."""
    return f"{_interpreter()} -u -m submitit.core._submit {shlex.quote(str(job_dir))}"


def job_script(cfg: Config, *, job_dir: Path, command: str) -> str:
    """The script of one run, het or split. Its output goes to `<job_dir>/slurm.out`; the directory
    has to exist when Slurm starts it.

    It runs there, and not where it was submitted: `python -m` would prefer a checkout in the
    current directory to the snapshot.
    """
    run_dir = Path(cfg.run.runs_dir) / cfg.run.name
    job: Flags = {
        "job-name": cfg.run.name,
        "comment": f"slurm_grpo {run_dir}",
        "output": str(job_dir / "slurm.out"),
        "chdir": str(job_dir),
    }
    lines = [
        "export SUBMITIT_EXECUTOR=slurm",
        # A requeued job must not be judged by the result of its life before.
        f"rm -f {shlex.quote(str(job_dir))}/*_result.pkl",
    ]
    return _script(cfg, job, job_dir, lines, command)


def array_script(cfg: Config, *, sweep_dir: Path, n_elements: int, max_running: int) -> str:
    """The script of a sweep's elements 0 to `n_elements` - 1, in split mode; `cfg` is what they
    have in common.

    Their output goes to `<sweep_dir>/logs`, which has to exist. `sbatch --array=...` on the command
    line wins.
    """
    job: Flags = {
        "job-name": sweep_dir.name,
        "comment": f"slurm_grpo {sweep_dir}",
        "output": str(sweep_dir / "logs" / "%A_%a.out"),
        "chdir": str(sweep_dir),
        "array": f"0-{n_elements - 1}%{max_running}",
    }
    command = f"{_interpreter()} -u -m slurm_grpo.jobs.batch --sweep {shlex.quote(str(sweep_dir))}"
    return _script(cfg, job, sweep_dir, [], command)


def node_groups(cfg: Config) -> dict[str, NodesConfig]:
    """The groups of nodes a job asks for, by their key in the configuration, in component order."""
    if cfg.cluster.allocation == "split":
        return {"cluster.shared": cfg.cluster.shared}
    return {
        "cluster.generators": cfg.cluster.generators,
        "cluster.trainers": cfg.cluster.trainers,
    }


def threads_by_node(cfg: Config) -> list[list[int]]:
    """For each group and each of its nodes, the threads of the processes there, added up.

    Raises ConfigError when the processes do not fit the GPUs.
    """
    groups = list(node_groups(cfg).values())
    hosts = [[f"{group}.{n}" for n in range(nodes.nodes)] for group, nodes in enumerate(groups)]
    engine_threads = cfg.generator.threads * cfg.generator.engine.tensor_parallel
    threads: Counter[str] = Counter()
    for peer, seat in place(cfg, hosts).items():
        threads[seat.host] += engine_threads if peer.startswith("engine-") else cfg.trainer.threads
    return [[threads[host] for host in names] for names in hosts]


def cpus_per_node(cfg: Config) -> list[int]:
    """CPUs to ask for on each node of a group: what is configured, or what its fullest node
    needs."""
    return [
        nodes.cpus_per_node or max(threads)
        for nodes, threads in zip(node_groups(cfg).values(), threads_by_node(cfg), strict=True)
    ]


def gpu_flags(nodes: NodesConfig, site: SiteConfig) -> Flags:
    """What asks for all GPUs of a group's nodes."""
    if not nodes.gpus_per_node or site.gpu_flag == "none":
        return {}
    count = f"{site.gpu_type}:{nodes.gpus_per_node}" if site.gpu_type else nodes.gpus_per_node
    return {site.gpu_flag: f"gpu:{count}" if site.gpu_flag == "gres" else str(count)}


def adjusted(flags: Flags, removed: Collection[str], added: Iterable[str]) -> Flags:
    """`flags` without those that are `removed` by name, and with others added or in their place."""
    kept = {name: value for name, value in flags.items() if name not in removed}
    for flag in added:
        _, equals, value = flag.partition("=")
        kept[flag_name(flag)] = value if equals else None
    return kept


def flag_name(flag: str) -> str:
    """`mem` for `--mem=4G`."""
    return flag.removeprefix("--").partition("=")[0]


def _script(
    cfg: Config, job: Flags, folder: Path, lines_before: Iterable[str], command: str
) -> str:
    job |= {
        "time": cfg.cluster.time_limit,
        "signal": f"B:USR1@{cfg.cluster.signal_s}",  # to the supervisor alone
        "open-mode": "append",
    }
    lines = ["#!/bin/bash"]
    cpus = cpus_per_node(cfg)
    for component, (key, nodes) in enumerate(node_groups(cfg).items()):
        if component:
            lines += ["#SBATCH hetjob"]
        lines += [f"# {key}"]
        flags = (job if component == 0 else {}) | _node_flags(cfg, nodes, cpus[component])
        flags = adjusted(flags, cfg.site.remove_flags, (*cfg.site.flags, *nodes.flags))
        lines += [_line(name, value) for name, value in flags.items()]
    path = shlex.quote(str(folder / CODE))
    lines += ["", *cfg.site.setup]
    lines += [f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}", *lines_before]
    # Ignored signals stay ignored over exec: none is lost or fatal before the handlers are in.
    lines += ["trap '' USR1 TERM", f"exec {command}"]
    return "\n".join(lines) + "\n"


def _node_flags(cfg: Config, nodes: NodesConfig, cpus: int) -> Flags:
    """What each component has to say itself."""
    site = cfg.site
    flags: Flags = {
        "partition": nodes.partition,
        "account": nodes.account,
        "qos": nodes.qos,
        "nodes": str(nodes.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "constraint": nodes.constraint,
    }
    if nodes.mem_gib is not None and site.mem_flag == "mem":
        flags["mem"] = f"{nodes.mem_gib}G"
    elif nodes.mem_gib is not None and site.mem_flag == "mem-per-cpu":
        flags["mem-per-cpu"] = f"{nodes.mem_gib * 1024 // cpus}M"
    flags |= gpu_flags(nodes, site)
    flags = {name: value for name, value in flags.items() if value is not None}
    if nodes.exclusive:
        flags["exclusive"] = None
    flags["requeue"] = None
    return flags


def _line(name: str, value: str | None) -> str:
    return f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}")


def _interpreter() -> str:
    # Absolute: no shell start-up file, and so no `conda activate`, has run in a batch step.
    return shlex.quote(sys.executable)
