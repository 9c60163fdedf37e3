"""How a run stands, told from its own files first and from Slurm second.

Used by `slurm-grpo status|logs|cancel` and by sweeps. The order: what the last attempt wrote
(`supervisor.json`: its status, or a heartbeat every ten seconds), exit files, squeue, sacct. So a
cluster without accounting, or a laptop that holds a copy of the directory, gets an answer too.
Reads only; imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_grpo import proctree
from slurm_grpo.attempt import record_path
from slurm_grpo.config_values import nearest
from slurm_grpo.errors import ConfigError, SlurmUnavailable
from slurm_grpo.rundir import RunDir
from slurm_grpo.slurm.queue import UNKNOWN, ComponentState, job_states, jobs_of_script

SILENCE_S = 60.0
"""A heartbeat this old says nothing any more; six are due in the time."""
MANIFEST, ARRAY_SCRIPT = "manifest.json", "array.sh"
"""Of a sweep, in the directory that holds its runs."""
_ALIVE = ("queued", "starting", "running", "ending")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a run is doing, or how it ended."""

    word: str
    """queued, starting, running, ending; or how the last attempt ended: done, failed, stopped,
    interrupted, cancelled, died (without a word); or `not started`, or `unknown` without Slurm."""
    detail: str = ""
    """Why, in words."""
    attempt: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    """The last attempt's supervisor.json."""
    components: Sequence[ComponentState] = ()
    """The job's, where Slurm knows it."""

    @property
    def is_alive(self) -> bool:
        """Whether something runs, or will without anybody's doing."""
        return self.word in _ALIVE

    @property
    def job_ids(self) -> list[str]:
        """Ids to cancel, of jobs that are alive."""
        alive = [c for c in self.components if c.is_alive]
        return sorted({c.job_id if c.task is None else f"{c.job_id}_{c.task}" for c in alive})


def find_run(text: str) -> RunDir:
    """The run that a person names: a directory, or a name under runs/. Raises ConfigError."""
    for root in (Path(text), Path("runs") / text):
        if (root / "config.yaml").is_file():
            return RunDir(root.absolute())
    known = [str(path.parent) for path in sorted(Path("runs").glob("*/config.yaml"))]
    hint = nearest(f"runs/{text}", known) if known else "There is no run under runs/ either."
    raise ConfigError(f"{text}: no run directory (no config.yaml in it). {hint}")


def stand(run: RunDir) -> Standing:
    """How a run stands; asks Slurm unless its own files settle it."""
    try:
        return judge(run, ask_slurm(run))
    except SlurmUnavailable as error:
        standing = judge(run, [])
        if standing.word in ("died", "not started") and submitted_jobs(run):
            return Standing(
                word="unknown",
                detail=str(error),
                attempt=standing.attempt,
                record=standing.record,
            )
        return standing


def ask_slurm(run: RunDir) -> list[ComponentState]:
    """The components of the run's newest job that Slurm knows, alive ones first in line.

    Raises SlurmUnavailable; asks nothing when the run was never submitted.
    """
    if (run.root.parent / MANIFEST).is_file():
        number = element_number(run)
        mine = [s for s in jobs_of_script(run.root.parent / ARRAY_SCRIPT) if s.task == number]
        if alive := [s for s in mine if s.is_alive]:
            return alive
    jobs = submitted_jobs(run)
    known = [states for job in jobs if (states := job_states(jobs)[job])[0].state != UNKNOWN]
    alive_jobs = [states for states in known if any(s.is_alive for s in states)]
    return (alive_jobs or known or [[]])[-1]


def element_number(run: RunDir) -> int | None:
    """A run's place in the sweep whose directory it lies in, None if it is no element of one."""
    for element in read_json(run.root.parent / MANIFEST).get("elements", []):
        if Path(element["run_dir"]).name == run.root.name:
            return int(element["index"])
    return None


def submitted_jobs(run: RunDir) -> list[str]:
    """Slurm's ids of the run's jobs, as far as the run knows, oldest first."""
    folders = [p for p in (run.root / "jobs").glob("*") if not p.is_symlink()]
    ids = []
    for folder in sorted(folders, key=lambda p: int(p.name) if p.name.isdigit() else -1):
        path = folder / "job_id"
        ids += [path.read_text().strip()] if path.is_file() else []
    records = [read_json(record_path(run.attempt(n))) for n in run.attempt_numbers()[-1:]]
    ids += [str(record["job_id"]) for record in records if record.get("job_id")]
    return list(dict.fromkeys(filter(None, ids)))


def live_supervisor_here(run: RunDir) -> int | None:
    """Pid of the run's supervisor if it lives on this host."""
    holder = read_json(run.root / "supervisor.lock")
    if holder.get("host") != socket.gethostname():
        return None
    ticks = proctree.start_ticks(holder["pid"])
    return int(holder["pid"]) if ticks is not None and ticks == holder["start_ticks"] else None


def judge(run: RunDir, components: Sequence[ComponentState]) -> Standing:
    """How the run stands, given what Slurm says about its newest job (nothing: not asked)."""
    numbers = run.attempt_numbers()
    attempt = numbers[-1] if numbers else None
    record = {} if attempt is None else read_json(record_path(run.attempt(attempt)))
    silence_s = None if attempt is None else _silence_s(run, attempt)
    if any(c.is_alive for c in components):
        word, detail = _in_queue(components, record, silence_s)
    else:
        word, detail = _at_rest(run, attempt, record, silence_s, components)
    return Standing(word=word, detail=detail, attempt=attempt, record=record, components=components)


def _in_queue(
    components: Sequence[ComponentState], record: Mapping[str, Any], silence_s: float | None
) -> tuple[str, str]:
    states = {c.state for c in components}
    if "RUNNING" in states:
        if record.get("status") != "running" or silence_s is None:
            return "starting", ""
        return "running", _silent(silence_s)
    if states & {"COMPLETING", "SIGNALING", "STAGE_OUT"}:
        return "ending", ""
    reason = next((c.reason for c in components if c.reason not in ("", "None")), "")
    return "queued", ", ".join(filter(None, ["to continue" if record else "", reason]))


def _at_rest(
    run: RunDir,
    attempt: int | None,
    record: Mapping[str, Any],
    silence_s: float | None,
    components: Sequence[ComponentState],
) -> tuple[str, str]:
    """Slurm has no (living) job of the run: its own files say how it ended, or that it lives."""
    last = components[0].state if components else UNKNOWN
    job = f"Slurm: {last}" if last != UNKNOWN else ""
    if attempt is None or silence_s is None:
        if components and last != UNKNOWN:
            return ("cancelled" if last == "CANCELLED" else "failed"), f"before it began; {job}"
        forgotten = submitted_jobs(run)
        return "not started", f"Slurm has forgotten job {forgotten[-1]}" if forgotten else ""
    status = str(record.get("status", "running"))
    if status != "running":
        error = read_json(run.summary).get("error") if status != "done" else None
        return status, str(error or "")
    if live_supervisor_here(run) is not None:
        return ("running" if record else "starting"), _silent(silence_s)
    if silence_s < SILENCE_S and last == UNKNOWN:
        return ("running" if record else "starting"), ""
    codes = [
        f"{path.stem} exit code {path.read_text().strip()}"
        for path in sorted(run.attempt(attempt).root.glob("*.exit"))
    ]
    silent = f"no sign of life for {_words(silence_s)}"
    return "cancelled" if last == "CANCELLED" else "died", "; ".join(
        filter(None, [silent, job, *codes[:3]])
    )


def _silence_s(run: RunDir, attempt: int) -> float | None:
    """Seconds since the attempt's supervisor last wrote its record (or took its directory)."""
    folder = run.attempt(attempt)
    for path in (record_path(folder), folder.root):
        try:
            return max(0.0, time.time() - os.stat(path).st_mtime)
        except FileNotFoundError:
            continue
    return None


def _silent(silence_s: float) -> str:
    return "" if silence_s < SILENCE_S else f"no sign of life for {_words(silence_s)}"


def _words(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty when it is not there or not whole."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
