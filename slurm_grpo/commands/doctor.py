"""`slurm-grpo doctor`: what a run needs from a cluster, looked at before it costs GPU hours.

Each line is a pass, a failure with what to do, or `not checked` and why. First what the login node
can see, then a small job, submitted and started as a run would be, with one node of each group
(`slurm/doctor_probe.py` is its inside). Every wait has a deadline; a job that does not start is
cancelled, and Slurm's reason is told.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm_grpo.checks.load import check_config
from slurm_grpo.config.loading import freeze_config, read_config, with_values
from slurm_grpo.config.schema import ClusterConfig, Config
from slurm_grpo.errors import ConfigError, ExitCode, SlurmGrpoError, SlurmUnavailable
from slurm_grpo.fsio import storage_errors, write_durably
from slurm_grpo.jobs.doctor_probe import DONE, MODULE, PEERS, TASKS_S, TOKEN, Finding
from slurm_grpo.jobs.submission import expected_start, snapshot_package
from slurm_grpo.run.directory import RunDir
from slurm_grpo.slurm.queue import (
    ComponentState,
    cancel_jobs,
    job_states,
    not_of_our_form,
    run_slurm,
)
from slurm_grpo.slurm.script import CODE, job_script, node_groups
from slurm_grpo.slurm.submit_env import parse_job_id, run_sbatch

_LOOK_S = 0.5
_QUEUE_S = 5.0
_VISIBLE_S = 30.0
"""How long a file system may take to show the login node what the job wrote."""
_OLDEST = (20, 2)
"""Slurm before calls heterogeneous jobs otherwise."""
_PROBE_MEM_GIB = 16
_TAIL_LINES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="also check what this run asks for")
    parser.add_argument("--site", type=Path, help="the cluster's site file")
    parser.add_argument(
        "--wait-s", type=float, default=300.0, help="seconds the small job may wait to start (300)"
    )
    parser.add_argument(
        "options",
        nargs="*",
        metavar="-- OPTION",
        help="options of the configuration, such as -- --cluster.generators.partition gpu",
    )


def run(arguments: argparse.Namespace) -> int:
    cfg = _load(arguments)
    n_failed = 0
    for finding in _findings(cfg, arguments.config is not None, arguments.wait_s):
        n_failed += finding.state == "FAIL"
        sys.stdout.write(f"{finding.state:<12} {finding.what}: {finding.text}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{n_failed} failed\n" if n_failed else "everything that was checked passed\n")
    return ExitCode.FAILURE if n_failed else ExitCode.OK


def _load(arguments: argparse.Namespace) -> Config:
    base = Config(cluster=ClusterConfig(kind="slurm"))
    path = arguments.config or Path(os.devnull)
    cfg = read_config(path, arguments.options, site=arguments.site, base=base)
    if cfg.cluster.kind != "slurm":
        raise ConfigError(
            f"{path}: cluster.kind is {cfg.cluster.kind}, which needs no cluster. Pass a "
            "configuration with cluster.kind: slurm, or add --cluster.kind slurm."
        )
    return cfg


def _findings(cfg: Config, has_config: bool, wait_s: float) -> Iterator[Finding]:
    try:
        yield from _controller(run_slurm(["scontrol", "show", "config"]))
        yield from _partitions(cfg, run_slurm(["sinfo", "-h", "-a", "-o", "%P|%a|%l|%D|%G"]))
    except SlurmUnavailable as error:
        yield Finding("FAIL", "Slurm", str(error))
        yield Finding("not checked", "everything else", "it needs Slurm")
        return
    if has_config:
        yield from _configuration(cfg)
    else:
        yield Finding("not checked", "model and sizes", "no --config was given")
    yield from _job(cfg, wait_s)


def _controller(text: str) -> Iterator[Finding]:
    settings = dict(re.findall(r"^(\S+)\s*= (.*)$", text, flags=re.MULTILINE))
    version = settings.get("SLURM_VERSION")
    if version is None:
        raise not_of_our_form("scontrol", text)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST:
        yield Finding("FAIL", "Slurm", f"version {version}; heterogeneous jobs need 20.02 or later")
    else:
        yield Finding("pass", "Slurm", f"version {version}, cluster {settings.get('ClusterName')}")
    scheduler = settings.get("SchedulerType", "unknown")
    if scheduler == "sched/backfill":
        yield Finding("pass", "scheduler", f"{scheduler}, which heterogeneous jobs need")
    else:
        text = f"{scheduler}, but only sched/backfill starts heterogeneous jobs"
        yield Finding("FAIL", "scheduler", f"{text}. Use cluster.allocation: split.")


def _partitions(cfg: Config, text: str) -> Iterator[Finding]:
    rows = [row for line in text.splitlines() if len(row := line.split("|")) == 5]
    if not rows:
        raise not_of_our_form("sinfo", text)
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
    for key, nodes in node_groups(cfg).items():
        names = (nodes.partition or default or "").split(",")
        for name in names:
            mine = [row for row in rows if row[0].rstrip("*") == name]
            if not mine:
                there = ", ".join(sorted({row[0].rstrip("*") for row in rows}))
                text = f"{name or 'none given and no default'}; there are {there}"
                yield Finding("FAIL", f"{key}.partition", f"{text}. Name one of them.")
            elif mine[0][1] != "up":
                text = f"{name} is {mine[0][1]}: jobs wait. Ask the site, or name another."
                yield Finding("FAIL", f"{key}.partition", text)
            else:
                kinds = ", ".join(f"{row[3]} node(s), GPUs {row[4]}" for row in mine)
                text = f"{name} is up, at most {mine[0][2]}; {kinds}"
                yield Finding("pass", f"{key}.partition", text)


def _configuration(cfg: Config) -> Iterator[Finding]:
    problems = check_config(cfg)
    for problem in problems:
        key, _, text = problem.partition(": ")
        yield Finding("FAIL", key, text)
    if problems:
        return
    yield Finding("pass", "configuration", "sizes fit the partitions, files can be read here")
    try:
        said = expected_start(RunDir(Path(cfg.run.runs_dir) / cfg.run.name), cfg)
    except SlurmGrpoError as error:
        yield Finding("FAIL", "sbatch", " ".join(str(error).split()))
    else:
        yield Finding("pass", "sbatch", " ".join(said.split()))


def _job(cfg: Config, wait_s: float) -> Iterator[Finding]:
    """The small job, and what it found."""
    root = Path(cfg.run.runs_dir) / f".doctor-{secrets.token_hex(4)}"
    try:
        with storage_errors("make", root):
            root.mkdir(parents=True)
        probe = _small(cfg, root)
        freeze_config(probe, root / "config.yaml")
        write_durably(root / TOKEN, b"from the login node")
        snapshot_package(root / CODE)
        command = f"{shlex.quote(sys.executable)} -u -m {MODULE} {shlex.quote(str(root))}"
        script = job_script(probe, job_dir=root, command=command)
        job_id = parse_job_id(run_sbatch(["--parsable", "--no-requeue"], script=script))
    except SlurmGrpoError as error:
        yield Finding("FAIL", "small job", " ".join(str(error).split()))
        yield Finding("not checked", "nodes", "no job could be submitted")
        return
    failed = False
    try:
        for finding in _outcome(root, job_id, wait_s):
            failed |= finding.state == "FAIL"
            yield finding
    finally:
        with suppress(SlurmUnavailable):
            cancel_jobs([job_id])
    if failed:
        yield Finding("not checked", "logs", f"kept for a look: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)


def _small(cfg: Config, root: Path) -> Config:
    """`cfg` with one node, one GPU and one process in each group; two nodes to split if it has
    them."""
    values: dict[str, Any] = {
        "run.name": root.name,
        "cluster.time_limit": "10",
        "cluster.signal_s": 60,
        "generator.n_engines": 1,
        "generator.engine.tensor_parallel": 1,
        "trainer.n_ranks": 1,
    }
    for key, nodes in node_groups(cfg).items():
        most = 2 if key == "cluster.shared" else 1
        values[f"{key}.nodes"] = min(nodes.nodes, most)
        values[f"{key}.gpus_per_node"] = min(nodes.gpus_per_node, most)
        if nodes.mem_gib is not None:
            values[f"{key}.mem_gib"] = min(nodes.mem_gib, _PROBE_MEM_GIB)
    return with_values(cfg, values)


def _outcome(root: Path, job_id: str, wait_s: float) -> Iterator[Finding]:
    """Wait for the job's end, then read what its tasks left."""
    what, submitted = "small job", time.monotonic()
    states = _wait_start(root, job_id, wait_s)
    waited = time.monotonic() - submitted
    if any(state.state == "PENDING" for state in states):
        reasons = ", ".join(sorted({state.reason for state in states}))
        text = f"job {job_id} did not start within {wait_s:.0f} s: {reasons}. It was cancelled"
        yield Finding("FAIL", what, f"{text}; try --wait-s, or ask for less.")
        yield Finding("not checked", "nodes", "the small job did not start")
        return
    nodes = ", ".join(state.nodes for state in states if state.nodes)
    yield Finding("pass", what, f"job {job_id} started after {waited:.0f} s on {nodes or '?'}")
    if not _wait_done(root, job_id):
        words = ", ".join(sorted({state.state for state in job_states([job_id])[job_id]}))
        if (root / "slurm.out").is_file():
            text = f"job {job_id} is {words} and said: {_tail(root / 'slurm.out')}"
        else:
            text = (
                f"job {job_id} is {words}, and {root} shows nothing of it here: run.runs_dir is "
                "not shared with the nodes. Choose a directory on a shared file system."
            )
        yield Finding("FAIL", what, text)
        yield Finding("not checked", "nodes", "the small job did not come to its end")
        return
    yield from _read_tasks(root)


def _wait_start(root: Path, job_id: str, wait_s: float) -> list[ComponentState]:
    """The job's components, once none is pending, or when time is up."""
    deadline = time.monotonic() + wait_s
    while True:
        states = job_states([job_id])[job_id]
        if not any(state.state in ("PENDING", "CONFIGURING") for state in states):
            return states
        if time.monotonic() >= deadline or (root / DONE).exists():
            return states
        time.sleep(min(_QUEUE_S, max(0.0, deadline - time.monotonic()), 1.0 + wait_s / 60))


def _wait_done(root: Path, job_id: str) -> bool:
    """Whether the tasks came to their end, and the file that says so to this node."""
    deadline, next_look = time.monotonic() + 2 * TASKS_S, time.monotonic() + _QUEUE_S
    while time.monotonic() < deadline:
        os.listdir(root)  # NFS: forget that the file was missing
        if (root / DONE).is_file():
            return True
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _QUEUE_S
            alive = any(state.is_alive for state in job_states([job_id])[job_id])
            if not alive:
                # Its output, written before, tells whether files show up here at all.
                patience_s = _QUEUE_S if (root / "slurm.out").exists() else _VISIBLE_S
                deadline = min(deadline, time.monotonic() + patience_s)
        time.sleep(_LOOK_S)
    return False


def _read_tasks(root: Path) -> Iterator[Finding]:
    done = json.loads((root / DONE).read_text())
    reports: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        group = "trainers" if peer.startswith("trainer-") else "generators"
        try:
            reports[peer] = json.loads((root / f"{peer}.json").read_text())
        except FileNotFoundError:
            tail = _tail(Path(done["logs"][peer]))
            text = f"ended with {done['codes'][peer]} and said: {tail}"
            yield Finding("FAIL", group, text)
            continue
        for row in reports[peer]["findings"]:
            what = f"{group} on {reports[peer]['node']}, {row['what']}"
            yield Finding(row["state"], what, row["text"])
    if len(reports) == len(PEERS):
        ours, theirs = (report["versions"] for report in reports.values())
        for name in ("slurm_grpo", "torch"):
            if ours.get(name) != theirs.get(name):
                text = f"{ours.get(name)} for the engines, {theirs.get(name)} for the trainers"
                yield Finding("FAIL", f"versions of {name}", f"{text}. Use one environment.")
        claims = [peer for peer, report in reports.items() if report["has_claimed"]]
        if len(claims) == 1:
            yield Finding("pass", "shared directory", "of two nodes, one made the same file")
        else:
            text = f"{len(claims)} of two nodes made the same file with link(), instead of one"
            yield Finding("FAIL", "shared directory", f"{text}. Use another file system.")


def _tail(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(errors="replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
    return f"nothing in {path}"
