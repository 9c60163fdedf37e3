"""The door in front of every weight transfer: nobody enters the collective until every member is
there. Pure.

The trainer opens it for a version. Until `go`, the members are whoever is ready; each change of
membership is a new epoch. After `go` the membership is fixed: a death is reported to the trainer as
a failure, and the trainer's `sync_failed` forms the next epoch for the same version. An epoch whose
members all lived is used again for the next version, so that the process group can be kept. (epoch,
version) never repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_grpo.errors import MessageError
from slurm_grpo.peers import engine_name


class Door:
    """One policy group's worth of engines on their way into one transfer."""

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self._epoch = 0
        self._epoch_version: int | None = None  # last version the epoch was used for
        self._broken = True
        self._members: dict[int, int] = {}  # engine -> incarnation, by engine id
        self._first_ranks: dict[str, int] = {}
        """Rank of each member's first worker; rank 0 is the sending trainer. Replaced, never
        changed.
        """
        self._waiting_since: dict[int, float] = {}
        self._gone: set[int] = set()  # died after go: their next incarnation is no member
        self._arrived: set[int] = set()
        self._acks: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self._store = ""
        self.version: int | None = None
        """The version being sent; None while the door is closed."""
        self.go = False

    @property
    def members(self) -> list[int]:
        """Engines the door is open for, ascending; without those that died after go."""
        return [e for e in self._members if self._is_member(e)]

    def open(self, version: int, store: str, ready: Mapping[int, int], now: float) -> None:
        """Ask the ready engines (id -> incarnation) to the door. Opening it again for the same
        version keeps it.
        """
        self._store = store
        if version != self.version:
            self.version = version
            self._waiting_since.clear()
            self._form(ready, now)

    def refresh(self, ready: Mapping[int, int], now: float) -> set[int]:
        """Follow the ready engines until go; returns the engines concerned by a new epoch."""
        if self.version is None or self.go or self._members == ready:
            return set()
        former = set(self._members)
        self._broken = True
        self._form(ready, now)
        return former | set(self._members)

    def arrived(self, engine: int, epoch: int, version: int) -> bool:
        """An engine stands at the door; returns whether this was the last one missing."""
        if not self._awaits(engine, epoch, version) or self.go:
            return False
        self._arrived.add(engine)
        self.go = len(self._arrived) == len(self._members)
        return self.go

    def received(self, engine: int, epoch: int, version: int, digest: Any) -> None:
        """An engine holds the whole version in staging."""
        if self._awaits(engine, epoch, version) and self.go:
            self._acks[engine_name(engine)] = digest

    def failed(self, engine: int, epoch: int, version: int, error: str) -> None:
        """An engine could not receive."""
        if self._awaits(engine, epoch, version) and self.go:
            self._failed[engine_name(engine)] = error
            self._broken = True

    def exited(self, engine: int) -> None:
        """An engine died. Before go `refresh` removes it, after go the trainer hears of it."""
        if self.version is not None and self.go and engine in self._members:
            self._broken = True
            self._gone.add(engine)
            if engine_name(engine) not in self._acks:
                self._failed.setdefault(engine_name(engine), "exited during the transfer")

    def sync_failed(
        self, epoch: int, version: int, ready: Mapping[int, int], now: float
    ) -> set[int]:
        """Form the next epoch for the same version; returns the engines concerned."""
        if not self._is_current(epoch, version):
            return set()
        former = set(self._members)
        self._broken = True
        self._waiting_since.clear()
        self._form(ready, now)
        return former | set(self._members)

    def commit(self, epoch: int, version: int) -> list[int]:
        """Close the door; returns the living engines that hold the version."""
        if not self._is_current(epoch, version) or not self.go:
            raise MessageError(
                f"commit: epoch {epoch}, version {version} is not in transfer "
                f"(the door stands at epoch {self._epoch}, version {self.version}, go {self.go})."
            )
        holders = [e for e in self.members if engine_name(e) in self._acks]
        self.version = None
        self.go = False
        return holders

    def late(self, now: float) -> dict[int, float]:
        """Members not at the door yet, with the seconds since they were asked to come."""
        if self.version is None or self.go:
            return {}
        return {e: now - self._waiting_since[e] for e in self._members if e not in self._arrived}

    def engine_view(self, engine: int) -> dict[str, Any] | None:
        """What a member needs to join: None for anybody else."""
        if not self._is_member(engine):
            return None
        return {
            **self._common(),
            "store": self._store,
            "first_rank": self._first_ranks[engine_name(engine)],
        }

    def trainer_view(self) -> dict[str, Any] | None:
        if self.version is None:
            return None
        return {
            **self._common(),
            "members": self._first_ranks,
            "arrived": [engine_name(e) for e in sorted(self._arrived)],
            "acks": dict(self._acks),
            "failed": dict(self._failed),
        }

    def _common(self) -> dict[str, Any]:
        world_size = 1 + self._tensor_parallel * len(self._members)
        return {
            "epoch": self._epoch,
            "version": self.version,
            "world_size": world_size,
            "go": self.go,
        }

    def _is_current(self, epoch: int, version: int) -> bool:
        return self.version is not None and (epoch, version) == (self._epoch, self.version)

    def _awaits(self, engine: int, epoch: int, version: int) -> bool:
        return self._is_current(epoch, version) and self._is_member(engine)

    def _is_member(self, engine: int) -> bool:
        return self.version is not None and engine in self._members and engine not in self._gone

    def _form(self, ready: Mapping[int, int], now: float) -> None:
        members = dict(sorted(ready.items()))
        if self._broken or members != self._members or self._epoch_version == self.version:
            self._epoch += 1
        self._epoch_version = self.version
        self._broken = False
        self._members = members
        self._first_ranks = {
            engine_name(e): 1 + self._tensor_parallel * i for i, e in enumerate(members)
        }
        self._waiting_since = {e: self._waiting_since.get(e, now) for e in members}
        self.go = False
        self._gone, self._arrived, self._acks, self._failed = set(), set(), {}, {}
