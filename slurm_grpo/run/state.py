"""How a run stands, told from its own files first and from Slurm second.

Used by `slurm-grpo status|logs|cancel` and by sweeps. The order: what the last attempt wrote
(`supervisor.json`: its status, or a heartbeat every ten seconds), exit files, squeue, sacct. So a
cluster without accounting, or a laptop that holds a copy of the directory, gets an answer too.
Reads only; imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_grpo.config.values import nearest
from slurm_grpo.errors import ConfigError, SlurmUnavailable
from slurm_grpo.run import proctree
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.outcome import Ending
from slurm_grpo.run.summary import read_json
from slurm_grpo.slurm.queue import UNKNOWN, ComponentState, job_states, jobs_of_script

SILENCE_S = 60.0
"""A heartbeat this old says nothing any more; six are due in the time."""
MANIFEST, ARRAY_SCRIPT = "manifest.json", "array.sh"
"""Of a sweep, in the directory that holds its runs."""
RUN_HELP = "run directory, or its name under runs/"
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


def find_directory(text: str, marker: str, what: str) -> Path:
    """The directory that a person names, by its path or its name under runs/, and that holds the
    file `marker`. Raises ConfigError."""
    for root in (Path(text), Path("runs") / text):
        if (root / marker).is_file():
            return root
    known = [str(path.parent) for path in sorted(Path("runs").glob(f"*/{marker}"))]
    hint = nearest(f"runs/{text}", known) if known else f"There is no {what} under runs/ either."
    raise ConfigError(f"{text}: no {what} directory (no {marker} in it). {hint}")


def find_run(text: str) -> RunDir:
    """The run that a person names: a directory, or a name under runs/. Raises ConfigError."""
    return RunDir(find_directory(text, "config.yaml", "run").absolute())


def run_path(text: str) -> Path:
    """Like `find_run`, for a directory that may hold nothing but episodes."""
    path = Path(text)
    return path if RunDir(path).episodes.is_dir() else find_run(text).root


def stand(run: RunDir) -> Standing:
    """How a run stands; `unknown` if that depends on a Slurm that does not answer."""
    return stand_all([run])[0]


def stand_all(runs: Sequence[RunDir], *, strict: bool = False) -> list[Standing]:
    """How each of many runs stands; asks Slurm a few times, not a few times each.

    `unknown` where that depends on a Slurm that does not answer; with `strict`, SlurmUnavailable is
    raised then if a run was submitted or lies in a sweep.
    """
    try:
        return [judge(run, job) for run, job in zip(runs, _newest_jobs(runs), strict=True)]
    except SlurmUnavailable as error:
        if strict:
            raise
        why = str(error)
        by_files = {run: judge(run, []) for run in runs}
    return [
        dataclasses.replace(standing, word="unknown", detail=why)
        if standing.word in ("died", "not started")
        and (submitted_jobs(run) or (run.root.parent / ARRAY_SCRIPT).is_file())
        else standing
        for run, standing in by_files.items()
    ]


def _newest_jobs(runs: Sequence[RunDir]) -> Iterator[Sequence[ComponentState]]:
    """Of each run, what Slurm says of its newest job."""
    jobs = {run: submitted_jobs(run) for run in runs}
    known = job_states(list(dict.fromkeys(job for ids in jobs.values() for job in ids)))
    arrays = {
        folder: jobs_of_script(folder / ARRAY_SCRIPT)
        for folder in {run.root.parent for run in runs}
        if (folder / ARRAY_SCRIPT).is_file()
    }
    for run in runs:
        queued = [[c for c in known[job] if is_of(c, run)] for job in jobs[run]]
        if tasks := arrays.get(run.root.parent):
            number = element_number(run)
            queued += [[task] for task in tasks if task.task == number]
        yield _newest(queued)


def is_of(component: ComponentState, run: RunDir) -> bool:
    """Whether a job is the run's, and not another's with its number: on another cluster, or after
    ids began anew."""
    script = os.path.realpath(component.script)
    ours = (os.path.realpath(run.root) + "/", os.path.realpath(run.root.parent / ARRAY_SCRIPT))
    return not component.script or script.startswith(ours)


def _newest(jobs: Sequence[Sequence[ComponentState]]) -> Sequence[ComponentState]:
    """Of a run's jobs, oldest first, the last that is alive; else the last that Slurm knows."""
    alive = [job for job in jobs if any(c.is_alive for c in job)]
    known = [job for job in jobs if job and job[0].state != UNKNOWN]
    return (alive or known or [[]])[-1]


def element_number(run: RunDir) -> int | None:
    """A run's place in the sweep whose directory it lies in, None if it is no element of one."""
    for element in read_json(run.root.parent / MANIFEST).get("elements", []):
        if Path(element["run_dir"]).name == run.root.name:
            return int(element["index"])
    return None


def submitted_jobs(run: RunDir) -> list[str]:
    """Slurm's ids of the run's jobs, as far as the run knows, oldest first."""
    paths = (folder / "job_id" for folder in run.job_dirs())
    ids = [path.read_text().strip() for path in paths if path.is_file()]
    records = [read_json(run.attempt(n).record) for n in run.attempt_numbers()[-1:]]
    ids += [str(record["job_id"]) for record in records if record.get("job_id")]
    return list(dict.fromkeys(filter(None, ids)))


def live_supervisor_here(run: RunDir) -> int | None:
    """Pid of the run's supervisor if it lives on this host."""
    holder = read_json(run.root / "supervisor.lock")
    if holder.get("host") != socket.gethostname():
        return None
    ticks = proctree.start_ticks(holder["pid"])
    return int(holder["pid"]) if ticks is not None and ticks == holder["start_ticks"] else None


def tally(standings: Sequence[Standing]) -> str:
    """`2 done, 1 running`."""
    counts = Counter(standing.word for standing in standings)
    return ", ".join(f"{n} {word}" for word, n in counts.items())


def judge(run: RunDir, components: Sequence[ComponentState]) -> Standing:
    """How the run stands, given what Slurm says about its newest job (nothing: not asked)."""
    numbers = run.attempt_numbers()
    attempt = numbers[-1] if numbers else None
    record = {} if attempt is None else read_json(run.attempt(attempt).record)
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
        was_cancelled = record.get("ending") == Ending.CANCELLED.value
        return "cancelled" if was_cancelled else status, str(error or "")
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
    for path in (folder.record, folder.root):
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
