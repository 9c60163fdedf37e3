"""The whole control plane as one pure state machine: assignments, versions, the door, evaluations,
liveness, stop.

Level-triggered: peers send events (`handle`), and every peer has a *view*, a JSON object with all
that is wanted of it now. The server sees to it that the peer holds the newest view, so a lost
message is harmless. There is no I/O and no clock here: `now` is an argument, in monotonic seconds,
so that tests simulate time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slurm_grpo.config.schema import Config
from slurm_grpo.control.assignment import Assignment
from slurm_grpo.control.door import Door
from slurm_grpo.control.evaluation import Evaluations
from slurm_grpo.control.messages import Body, check_body, check_kind
from slurm_grpo.errors import MessageError
from slurm_grpo.peers import LEADER, engine_name, trainer_name

View: TypeAlias = dict[str, Any]

STALL_S = 5.0
"""A longer pause between two ticks means that this process itself was stopped: peers are not to
blame for it.
"""


@dataclass(slots=True)
class _Peer:
    """One role process, in its current incarnation."""

    name: str
    incarnation: int = -1
    state: str = "down"  # down, starting, ready
    started_at: float = 0.0
    last_seen: float = 0.0
    host: str = ""
    pid: int = 0
    log: str = ""


@dataclass(slots=True)
class _Engine(_Peer):
    engine_id: int = 0
    committed: int | None = None
    """Version of the last transfer this incarnation took part in and the trainer committed."""
    committed_at: float = 0.0
    installed: int | None = None
    """Version the engine says it generates with."""
    is_installing: bool = False
    probe: list[int] = field(default_factory=list)
    """Token ids whose log-probabilities it reports after every installation."""
    stats: Body = field(default_factory=dict)
    """The body of its last `installed`."""
    card: View | None = None
    """Its entry in the trainer's view, without ages; None when it has to be made again."""


class Scheduler:
    """State of one attempt. Not thread-safe: the server owns the lock."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._engines = [
            _Engine(engine_name(k), engine_id=k) for k in range(cfg.generator.n_engines)
        ]
        self._trainers = [_Peer(trainer_name(r)) for r in range(cfg.trainer.n_ranks)]
        self._peers: dict[str, _Peer] = {p.name: p for p in [*self._engines, *self._trainers]}
        self._assignment = Assignment(cfg)
        self._door = Door(cfg.generator.engine.tensor_parallel)
        self._evaluations = Evaluations(cfg)
        self._version: int | None = None  # last committed
        self._trainer_store: str | None = None
        self._stop: str | None = None
        self._boundary_stop = False
        self._now = 0.0
        self._last_tick: float | None = None
        self._touched: set[str] = set(self._peers)
        self._last_views: dict[str, View] = {}
        self._is_assigning_due = False
        self.finished: str | None = None
        """Status the trainer finished with."""
        self.progress: Body = {}
        """Latest progress report of the trainer."""

    @property
    def heartbeat_timeout_s(self) -> float:
        return self._cfg.cluster.heartbeat_timeout_s

    @property
    def n_peers(self) -> int:
        return len(self._peers)

    # Called for messages

    def handle(self, peer: str, incarnation: int, kind: str, body: Body, now: float) -> None:
        """Take one message. Raises MessageError for one that cannot be understood; ignores dead
        incarnations.
        """
        check_kind(peer, kind)
        sender = self._known(peer)
        take = getattr(self, f"_on_{kind}")
        check_body(peer, kind, body, take)
        if incarnation > sender.incarnation:
            self._start(sender, incarnation, now)
        if incarnation < sender.incarnation or sender.state == "down":
            return
        self._now = sender.last_seen = now
        take(sender, **body)
        self._is_assigning_due |= kind != "heartbeat"

    def _on_heartbeat(self, sender: _Peer, /, **_: Any) -> None:
        pass

    def _on_hello(self, sender: _Peer, /, host: str, pid: int, log: str, **_: Any) -> None:
        sender.host, sender.pid, sender.log = host, pid, log
        if sender.name.startswith("trainer-") and sender.name != LEADER:
            sender.state = "ready"
        self._touch(sender)

    # Messages of engines

    def _on_ready(self, sender: _Engine, /, probe: list[int], **_: Any) -> None:
        sender.state = "ready"
        sender.probe = probe
        self._touch(sender)
        self._refresh_door()

    def _on_at_door(self, sender: _Engine, /, epoch: int, version: int, **_: Any) -> None:
        if self._door.arrived(sender.engine_id, epoch, version):
            self._touch_views(*self._engines)
        self._touch_views(sender)

    def _on_received(
        self, sender: _Engine, /, epoch: int, version: int, digest: Any, **_: Any
    ) -> None:
        self._door.received(sender.engine_id, epoch, version, digest)
        self._touch()

    def _on_receive_failed(
        self, sender: _Engine, /, epoch: int, version: int, error: str, **_: Any
    ) -> None:
        self._door.failed(sender.engine_id, epoch, version, error)
        self._touch()

    def _on_installed(self, sender: _Engine, /, version: int, **stats: Any) -> None:
        if version != sender.committed:
            raise MessageError(
                f"{sender.name}: installed {version}, but {sender.committed} was committed."
            )
        sender.installed = version
        sender.is_installing = False
        sender.stats = {"version": version, **stats}
        self._touch(sender)

    def _on_announce(self, sender: _Engine, /, shard: Body, **_: Any) -> None:
        settled = self._assignment.announce(shard)
        self._touch(sender, *(self._engines[e] for e in settled))

    def _on_eval_result(
        self,
        sender: _Engine,
        /,
        eval_id: str,
        start: int,
        stop: int,
        n: int,
        n_judged: int,
        n_correct: int,
        reward_sum: float,
        n_tokens: int,
        n_truncated: int,
        **_: Any,
    ) -> None:
        sums = {
            "n": n,
            "n_judged": n_judged,
            "n_correct": n_correct,
            "reward_sum": reward_sum,
            "n_tokens": n_tokens,
            "n_truncated": n_truncated,
        }
        self._evaluations.result(sender.engine_id, eval_id, start, stop, sums)
        self._touch(sender)

    # Messages of trainer rank 0

    def _on_trainer_store(self, sender: _Peer, /, address: str, **_: Any) -> None:
        self._trainer_store = address
        self._touch(*self._trainers)

    def _on_begin(
        self,
        sender: _Peer,
        /,
        next_group: int,
        n_dropped: int,
        consumed: list[int],
        available: list[Body],
        spare: int,
        **_: Any,
    ) -> None:
        self._assignment.begin(next_group, n_dropped, consumed, available, spare)
        sender.state = "ready"
        self._touch()

    def _on_open_door(self, sender: _Peer, /, version: int, store: str, **_: Any) -> None:
        unfinished = self._evaluations.unfinished_before(version)
        if unfinished:
            raise MessageError(
                f"open_door: version {version} would end the evaluations {', '.join(unfinished)}; "
                "wait for them first."
            )
        self._door.open(version, store, self._ready(), self._now)
        self._touch_views(*self._engines)

    def _on_sync_failed(
        self, sender: _Peer, /, epoch: int, version: int, reason: str, **_: Any
    ) -> None:
        concerned = self._door.sync_failed(epoch, version, self._ready(), self._now)
        self._touch(*(self._engines[e] for e in concerned))

    def _on_commit(self, sender: _Peer, /, epoch: int, version: int, **_: Any) -> None:
        holders = self._door.commit(epoch, version)
        self._version = version
        for engine in (self._engines[k] for k in holders):
            engine.committed = version
            engine.committed_at = self._now
            engine.is_installing = True
        self._touch_views(*self._engines)

    def _on_consumed(
        self,
        sender: _Peer,
        /,
        version: int,
        group_ids: list[int],
        dropped: list[int],
        spare: int,
        **_: Any,
    ) -> None:
        settled = self._assignment.consumed(group_ids, dropped, version, spare)
        self._touch(*(self._engines[e] for e in settled))

    def _on_lost(self, sender: _Peer, /, group_ids: list[int], **_: Any) -> None:
        self._assignment.lost(group_ids)
        self._touch()

    def _on_evaluate(self, sender: _Peer, /, eval_id: str, version: int, n: int, **_: Any) -> None:
        self._evaluations.request(eval_id, version, n)
        self._touch()

    def _on_progress(self, sender: _Peer, /, **body: Any) -> None:
        self.progress = body

    def _on_finish(self, sender: _Peer, /, status: str, **_: Any) -> None:
        self.finished = status
        self._touch(*self._engines)

    # Called by the supervisor

    def tick(self, now: float) -> None:
        """Advance the clock; call it about every second, so that a stall of this process is
        noticed.
        """
        if self._last_tick is not None and now - self._last_tick > STALL_S:
            for peer in self._peers.values():
                peer.last_seen = max(peer.last_seen, now)
        self._now = self._last_tick = now

    def starting(self, peer: str, incarnation: int, now: float) -> None:
        """The supervisor is about to start this process; its deadlines count from here."""
        self._start(self._peers[peer], incarnation, now)

    def exited(self, peer: str, now: float) -> None:
        """The process is gone. An engine's groups and evaluation chunks go back, and the door
        forgets it; what follows from a trainer's end is the supervisor's decision.
        """
        gone = self._peers[peer]
        self._now = now
        gone.state = "down"
        if not isinstance(gone, _Engine):
            return
        gone.committed = gone.installed = None
        gone.is_installing = False
        gone.stats = {}
        self._assignment.release(gone.engine_id)
        self._evaluations.release(gone.engine_id)
        self._door.exited(gone.engine_id)
        self._touch(gone)
        self._refresh_door()
        self._is_assigning_due = True

    def request_stop(self, reason: str, now: float) -> None:
        """Everybody is to leave at once. The first reason stands."""
        self._now = now
        self._stop = self._stop or reason
        self._touched.update(self._peers)

    def request_boundary_stop(self) -> None:
        """The trainer is to checkpoint and finish at the next step boundary."""
        self._boundary_stop = True
        self._touch()

    def overdue_peers(self, now: float) -> dict[str, str]:
        """Peers the supervisor must kill, each with a sentence that says what was waited for and
        which log to read.
        """
        overdue: dict[str, str] = {}
        late = self._door.late(now)
        for peer in self._peers.values():
            reason = self._overdue(peer, now, late)
            if reason:
                where = f" on {peer.host}" if peer.host else ""
                log = f" Read {peer.log}" if peer.log else ""
                overdue[peer.name] = f"{peer.name}{where}: {reason}.{log}"
        return overdue

    def _overdue(self, peer: _Peer, now: float, late: Mapping[int, float]) -> str | None:
        cluster, door_timeout_s = self._cfg.cluster, self._cfg.weight_sync.door_timeout_s
        silent_s, started_s = now - peer.last_seen, now - peer.started_at
        if peer.state == "down":
            return None
        if peer.state == "starting" and started_s > cluster.start_timeout_s:
            return f"not ready {started_s:.0f} s after its start (cluster.start_timeout_s)"
        if peer.host and silent_s > cluster.heartbeat_timeout_s:
            return f"no heartbeat for {silent_s:.0f} s (cluster.heartbeat_timeout_s)"
        if not isinstance(peer, _Engine):
            return None
        late_s = late.get(peer.engine_id, 0.0)
        if late_s > door_timeout_s:
            what = f"not at the door for version {self._door.version} after {late_s:.0f} s"
            return f"{what} (weight_sync.door_timeout_s)"
        installing_s = now - peer.committed_at
        if peer.is_installing and installing_s > door_timeout_s:
            what = f"version {peer.committed} not installed {installing_s:.0f} s after its commit"
            return f"{what} (weight_sync.door_timeout_s)"
        return None

    # Views

    def dirty(self) -> set[str]:
        """Peers whose view changed since this was last asked."""
        self._assign()
        changed: set[str] = set()
        for name in self._touched:
            view = self._content(name)
            if view != self._last_views.get(name):
                self._last_views[name] = view
                changed.add(name)
        self._touched.clear()
        return changed

    def view(self, peer: str, incarnation: int | None = None) -> View:
        """The peer's whole desired state; to be read, not changed.

        All: `stop` (None or the reason to leave at once). Engines: `groups` owed, `again` (how
        often such a group was lost before), `door` to come to, `committed` (version to install;
        None while the door is open), `evals` (chunks owed). Trainers: `trainer_store`; rank 0 also
        `boundary_stop`, `shards` to choose from by path, `door` with its members, `unsynced`
        engines, finished `evals`, all `engines`, and their `heartbeat_ages_s`. A replaced
        incarnation is told to stop.
        """
        known = self._known(peer)
        self._assign()
        is_known = peer in self._last_views and peer not in self._touched
        view = self._last_views[peer] if is_known else self._content(peer)
        if incarnation is not None and incarnation < known.incarnation:
            view = {**view, "stop": f"replaced by incarnation {known.incarnation}"}
            view.update({key: [] for key in ("groups", "evals") if key in view and peer != LEADER})
        if peer == LEADER:
            ages = {e.name: round(self._now - e.last_seen, 1) for e in self._engines}
            view = {**view, "heartbeat_ages_s": ages}
        return view

    def _content(self, name: str) -> View:
        peer = self._peers[name]
        if isinstance(peer, _Engine):
            door = self._door.engine_view(peer.engine_id)
            return {
                "stop": self._stop or ("the run is finished" if self.finished else None),
                "groups": self._assignment.outstanding(peer.engine_id),
                "again": self._assignment.times_lost(peer.engine_id),
                "door": door,
                "committed": peer.committed if door is None else None,
                "evals": self._evaluations.chunks(peer.engine_id),
            }
        if name != LEADER:
            return {"stop": self._stop, "trainer_store": self._trainer_store}
        return {
            "stop": self._stop,
            "boundary_stop": self._boundary_stop,
            "trainer_store": self._trainer_store,
            "shards": self._assignment.shards(),
            "door": self._door.trainer_view(),
            "unsynced": self._unsynced(),
            "evals": self._evaluations.complete(),
            "engines": {e.name: self._card(e) for e in self._engines},
        }

    def _card(self, engine: _Engine) -> View:
        if engine.card is None:
            engine.card = {
                "state": engine.state,
                "incarnation": engine.incarnation,
                "version": engine.installed,
                "groups": self._assignment.outstanding(engine.engine_id),
                "host": engine.host,
                "pid": engine.pid,
                "log": engine.log,
                "probe": engine.probe,
                "stats": engine.stats,
            }
        return engine.card

    def _unsynced(self) -> list[str]:
        """Ready engines without the committed version that no open door will give it to."""
        at_door = set(self._door.members)
        return [
            e.name
            for e in self._engines
            if (e.committed is None or e.committed != self._version)
            and e.state == "ready"
            and e.engine_id not in at_door
        ]

    # Helpers

    def _known(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise MessageError(
                f"control plane: this run has no {peer}; it has {', '.join(self._peers)}."
            )
        return self._peers[peer]

    def _touch(self, *peers: _Peer) -> None:
        """The views of these peers and of the trainer may have changed, and so may their cards."""
        self._touch_views(*peers)
        for peer in peers:
            if isinstance(peer, _Engine):
                peer.card = None

    def _touch_views(self, *peers: _Peer) -> None:
        """The same without the cards: a door, a commit and an evaluation are not on them."""
        self._touched.add(LEADER)
        self._touched.update(peer.name for peer in peers)

    def _start(self, peer: _Peer, incarnation: int, now: float) -> None:
        if isinstance(peer, _Engine) and peer.state != "down":
            self.exited(peer.name, now)
        self._now = now
        peer.incarnation, peer.state = incarnation, "starting"
        peer.started_at = peer.last_seen = now
        peer.host, peer.pid = "", 0
        self._touch(peer)

    def _ready(self) -> dict[int, int]:
        return {e.engine_id: e.incarnation for e in self._engines if e.state == "ready"}

    def _refresh_door(self) -> None:
        concerned = self._door.refresh(self._ready(), self._now)
        self._touch(*(self._engines[e] for e in concerned))

    def _assign(self) -> None:
        """Give evaluation chunks and groups to every engine that may have some, if that may have
        changed.

        When somebody looks, not at each message: it concerns all engines.
        """
        if not self._is_assigning_due:
            return
        self._is_assigning_due = False
        at_door = set(self._door.members)
        versions = {
            e.engine_id: e.installed
            for e in self._engines
            if e.installed is not None and not e.is_installing and e.engine_id not in at_door
        }
        if not versions or self._stop:
            return
        given = self._evaluations.assign(versions)
        if not (self._cfg.strict_mode and self._evaluations.is_pending):
            n_ready = sum(e.state == "ready" for e in self._engines)
            given |= self._assignment.assign(versions, n_ready)
        self._touch(*(self._engines[e] for e in given))
