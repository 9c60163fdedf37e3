"""What Slurm says about jobs: `squeue` first, then `sacct` where the cluster has accounting.

Asked by the executor's watcher, `slurm-grpo status` and sweeps. Promises one answer for every id
asked about, whatever its kind (plain, heterogeneous, array, array element); a job that Slurm has
forgotten (after MinJobAge, without accounting) is `UNKNOWN`, and then the run directory's own files
decide. Knows nothing about run directories.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_grpo.errors import SlurmUnavailable

UNKNOWN = "UNKNOWN"
ALIVE = frozenset(
    "PENDING RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED RESIZING SIGNALING STAGE_OUT "
    "REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD".split()
)
"""States of a job that runs, or will run (again) without anybody's doing."""
_TIMEOUT_S = 60.0
_SHOWN = 500
"""Characters of an answer that nobody understands, in an error."""
_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
"""Of variables that would change what a command does or prints."""
_SQUEUE_FORMAT = "%i|%A|%T|%N|%r|%L|%M|%S|%o"
_SACCT_FORMAT = "JobID,JobIDRaw,State,NodeList,Reason,Elapsed,Start"
_ID = re.compile(r"(\d+)(?:\+(\d+)|_(\d+)|_\[([\d,:-]+(?:%\d+)?)\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentState:
    """One component of a job, or one element of an array."""

    job_id: str
    """The job's leader, or the array: digits only."""
    own_id: str = ""
    """What SLURM_JOB_ID is in a component or element of its own."""
    component: int = 0
    """Position in a heterogeneous job."""
    task: int | None = None
    """Position in an array."""
    state: str = UNKNOWN
    """Slurm's word, such as PENDING, or UNKNOWN."""
    nodes: str = ""
    """Slurm's list, such as `gen[1-2]`."""
    reason: str = ""
    """Why it is pending, or ended; `None` when there is none."""
    left: str = ""
    """Time until its limit, as squeue writes it."""
    elapsed: str = ""
    start: str = ""
    """When it started, or is expected to: ISO 8601 without a zone, or `N/A`."""
    script: str = ""
    """Path of the batch script."""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def job_states(job_ids: Sequence[str]) -> dict[str, list[ComponentState]]:
    """By id (`12`, `12_3` for an element, or its own), its components or elements in order; never
    empty.

    Raises SlurmUnavailable when squeue is not there or the controller does not answer.
    """
    if not job_ids:
        return {}
    bases = sorted({job_id.partition("_")[0] for job_id in job_ids}, key=int)
    found = _squeue("-j", ",".join(bases))
    if forgotten := {i.partition("_")[0] for i in job_ids if not _matching(i, found)}:
        known = {(s.job_id, s.component, s.task) for s in found}
        remembered = _sacct(sorted(forgotten, key=int))
        found += [s for s in remembered if (s.job_id, s.component, s.task) not in known]
    return {job_id: _matching(job_id, found) or [_unknown(job_id)] for job_id in job_ids}


def jobs_of_script(script: Path) -> list[ComponentState]:
    """This user's jobs in the queue that run a batch script, whoever submitted it and how.

    Raises SlurmUnavailable.
    """
    wanted = os.path.realpath(script)
    states = _squeue("-u", str(os.getuid()))
    return [s for s in states if s.script and os.path.realpath(s.script) == wanted]


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Ask Slurm to end jobs (`12`: with all its components; `12_3`); harmless for ended ones.

    Raises SlurmUnavailable.
    """
    if job_ids:
        run_slurm(["scancel", *job_ids], tolerated="Invalid job id")


def expand_indices(text: str) -> list[int]:
    """Array indices as Slurm and sbatch write them: `0-7%4`, `1,3,5-9:2`."""
    indices: list[int] = []
    for part in filter(None, text.partition("%")[0].split(",")):
        bounds, _, stride = part.partition(":")
        low, _, high = bounds.partition("-")
        indices += range(int(low), int(high or low) + 1, int(stride or 1))
    return indices


def _matching(job_id: str, states: Sequence[ComponentState]) -> list[ComponentState]:
    base, _, task = job_id.partition("_")
    mine = [s for s in states if s.job_id == base and (not task or s.task == int(task))]
    mine = mine or [s for s in states if s.own_id == base and not task]
    return sorted(mine, key=lambda s: (s.component, -1 if s.task is None else s.task))


def _unknown(job_id: str) -> ComponentState:
    base, _, task = job_id.partition("_")
    return ComponentState(job_id=base, task=int(task) if task else None)


def _squeue(*selection: str) -> list[ComponentState]:
    # --array: a line an element, also of those that are still pending together.
    command = ["squeue", "--array", "-t", "all", *selection, "-o", _SQUEUE_FORMAT]
    return parse_squeue(run_slurm(command, tolerated="Invalid job id"))


def parse_squeue(text: str) -> list[ComponentState]:
    """What squeue printed in our format, below its header, which tells "no jobs" from no answer.

    Lines of another form, such as a site's notice, are skipped. Raises SlurmUnavailable when there
    are no others.
    """
    names = ("state", "nodes", "reason", "left", "elapsed", "start", "script")
    if text.strip() and not any(line.count("|") > len(names) for line in text.splitlines()):
        raise not_of_our_form("squeue", text)
    return list(_parse(text, names))


def not_of_our_form(command: str, text: str) -> SlurmUnavailable:
    """The error for an answer that holds nothing of what was asked for."""
    return SlurmUnavailable(
        f"Slurm cannot be asked: {command} printed nothing in the format it was given, but:\n"
        f"{text.strip()[:_SHOWN]}\nLook whether {command} here is a wrapper of the site's, and put "
        "Slurm's own bin directory first on PATH."
    )


def _sacct(job_ids: Sequence[str]) -> list[ComponentState]:
    """What accounting remembers; nothing on a cluster without."""
    command = ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", _SACCT_FORMAT]
    try:
        return parse_sacct(run_slurm(command))
    except SlurmUnavailable:
        return []


def parse_sacct(text: str) -> list[ComponentState]:
    """What sacct printed in our format. `CANCELLED by 1000` is CANCELLED."""
    found = _parse(text, ("state", "nodes", "reason", "elapsed", "start"))
    return [dataclasses.replace(s, state=s.state.partition(" ")[0]) for s in found]


def _parse(text: str, names: Sequence[str]) -> Iterator[ComponentState]:
    for line in text.splitlines():
        job_id, *more = line.split("|", len(names) + 1)
        if len(more) == len(names) + 1:
            fields: dict[str, Any] = dict(zip(names, more[1:], strict=True))
            yield from _expand(job_id, ComponentState(job_id="", own_id=more[0], **fields))


def _expand(text: str, state: ComponentState) -> Iterator[ComponentState]:
    """`state` under each id that `text` stands for: `12`, `12+1`, `12_3` or `12_[4-7%2]`; none when
    it is no id."""
    match = _ID.fullmatch(text)
    if match is None:
        return
    job_id, component, task, tasks = match.groups()
    indices: list[int | None] = [*expand_indices(tasks or task or "")]
    for index in indices or [None]:
        yield dataclasses.replace(state, job_id=job_id, component=int(component or 0), task=index)


def run_slurm(
    command: Sequence[str], *, tolerated: str | None = None, timeout_s: float = _TIMEOUT_S
) -> str:
    """What a Slurm command prints; nothing if it fails with `tolerated` in its complaint.

    Raises SlurmUnavailable with any other complaint.
    """
    # The user's own SQUEUE_FORMAT, or a surrounding job's SLURM_CLUSTERS, would change the answer.
    env = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(_PREFIXES)
    }
    env["SLURM_BITSTR_LEN"] = "0"  # or long lists of indices end in dots
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding=sys.getfilesystemencoding(),  # there are paths among the words
            errors="surrogateescape",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise SlurmUnavailable(
            f"{command[0]}: no such command here. Run this on a login node of the cluster, or put "
            "Slurm's bin directory on PATH."
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(
            f"{command[0]}: no answer within {timeout_s:.0f} s. The controller may be busy or "
            "down: try `sinfo`, and this again later."
        ) from None
    if done.returncode and tolerated and tolerated in done.stderr:
        return ""
    if done.returncode:
        raise SlurmUnavailable(
            f"{command[0]} failed: {done.stderr.strip() or f'exit code {done.returncode}'}. "
            "If `sinfo` fails too, Slurm is down or SLURM_CONF names another cluster."
        )
    return done.stdout
