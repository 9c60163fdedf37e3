"""One life of the supervisor: its number, its record on disk, and the lock that keeps a second one
out.

Used by the supervisor only; `summary.py` reads the records of all attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

from slurm_grpo.errors import ConfigError, LockLost
from slurm_grpo.fsio import storage_errors
from slurm_grpo.run import proctree
from slurm_grpo.run.directory import AttemptDir, RunDir

_HEARTBEAT_S = 10.0
_FOREIGN_WATCH_S = 3 * _HEARTBEAT_S


def take_attempt(run: RunDir) -> int:
    """Claim the next attempt number; mkdir decides between two claimants. Raises StorageError."""
    with storage_errors("take an attempt of", run.root):
        run.create()
        number = max(run.attempt_numbers(), default=-1) + 1
        while True:
            try:
                run.attempt(number).root.mkdir()
            except FileExistsError:
                number += 1
            else:
                return number


class AttemptRecord:
    """`attempts/<n>/supervisor.json`, renewed every ten seconds so that a killed attempt counts
    too."""

    def __init__(self, attempt: AttemptDir, **facts: Any) -> None:
        """`facts` are what the launcher knows about its surroundings: job id, nodes."""
        self._path = attempt.record
        self._started = time.monotonic()
        self._written = float("-inf")
        self._values: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_unix": time.time(),
            "status": "running",
            **facts,
        }

    def note(self, **values: Any) -> None:
        """Put `values` into the record with its next renewal."""
        self._values |= values

    def renew(self, *, peak_pss_bytes: int, status: str = "running") -> None:
        """Write the record if it is due or the status is final."""
        now = time.monotonic()
        if status == "running" and now - self._written < _HEARTBEAT_S:
            return
        self._written = now
        self._values |= {
            "status": status,
            "wall_s": round(now - self._started, 3),
            "cpu_s": round(time.process_time(), 3),
            "peak_pss_bytes": peak_pss_bytes,
        }
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._values))
        temporary.replace(self._path)


class RunLock:
    """At most one live supervisor per run directory, by a file that names its holder.

    A file and not `flock`, which some shared file systems refuse or keep per node. A holder that
    was killed is told by its pid and start time; one on another host by whether it still renews the
    file. A holder of the same Slurm job is an earlier life that Slurm has given up: it loses the
    file, and sees so.
    """

    def __init__(self, run: RunDir, job_id: str | None = None) -> None:
        self._path = run.root / "supervisor.lock"
        self._renewed = 0.0
        self._job_id = job_id
        self._mine = json.dumps(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "start_ticks": proctree.start_ticks(os.getpid()),
                "job_id": job_id,
            }
        )

    def acquire(self) -> None:
        """Take the lock. Raises ConfigError naming the live supervisor that holds it."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(self._mine)
        try:
            while True:
                try:
                    os.link(temporary, self._path)
                    return
                except FileExistsError:
                    self._remove_stale()
        finally:
            temporary.unlink()

    def renew(self) -> None:
        """Show other hosts that this supervisor lives; call it often. Raises LockLost."""
        if time.monotonic() - self._renewed > _HEARTBEAT_S:
            self._renewed = time.monotonic()
            self.check()
            os.utime(self._path)

    def check(self) -> None:
        """Raise LockLost if a newer life of this job has taken the run over."""
        try:
            holder = self._path.read_text()
        except FileNotFoundError:
            holder = "nobody"
        if holder != self._mine:
            raise LockLost(
                f"{self._path}: held by {holder} now. Slurm took this attempt for dead and started "
                "the job again; leaving the run to it."
            )

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.read_text() == self._mine:
                self._path.unlink()

    def _remove_stale(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            held = self._path.read_text()
            holder = json.loads(held)
            if self._is_live(holder):
                host, pid = holder["host"], holder["pid"]
                raise ConfigError(
                    f"{self._path.parent}: another supervisor runs here (host {host}, pid {pid}), "
                    f"and a run directory can have only one. Wait for it, end it with `kill {pid}` "
                    f"on {host}, or start under another --run.name."
                )
            aside = self._path.with_name(f".{self._path.name}.stale.{os.getpid()}")
            self._path.rename(aside)
            if aside.read_text() != held:  # somebody else was faster, and this is their new lock
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
            aside.unlink()

    def _is_live(self, holder: dict[str, Any]) -> bool:
        if self._job_id is not None and holder.get("job_id") == self._job_id:
            return False
        if holder["host"] == socket.gethostname():
            return bool(proctree.start_ticks(holder["pid"]) == holder["start_ticks"])
        seen = self._path.stat().st_mtime_ns
        deadline = time.monotonic() + _FOREIGN_WATCH_S
        while time.monotonic() < deadline:
            time.sleep(1.0)
            if self._path.stat().st_mtime_ns != seen:
                return True
        return False
