"""Which engine generates which group, and which announced groups the trainer has not used yet.
Pure.

The scheduler says which engines may be given work and with which installed version; this keeps the
ids. A group is in exactly one place: in a pool (nobody's), owned by an engine, announced in a
shard, or done (trained on or dropped).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import MessageError


class _Pool:
    """Ids waiting for an engine, lowest first: those given back, then `cursor`, `cursor + stride`,
    ...
    """

    def __init__(self, cursor: int, stride: int) -> None:
        self.cursor = cursor
        self.stride = stride
        self.returned: list[int] = []

    def take(self) -> int:
        if self.returned and self.returned[0] < self.cursor:
            return heapq.heappop(self.returned)
        self.cursor += self.stride
        return self.cursor - self.stride


class Assignment:
    """Group ids from pool to engine to shard to done.

    In strict mode every engine has a pool of its own (the ids congruent to it), so that a group
    never moves; otherwise one pool serves all. `g < groups_per_step * (v + 1 + max_staleness) +
    n_dropped + spare` bounds what version v may take: `spare` more groups are expected to be
    dropped, as the trainer says together with what is done, so that a round is given out whole.
    """

    def __init__(self, cfg: Config) -> None:
        algorithm, generator = cfg.algorithm, cfg.generator
        self._strict = cfg.strict_mode
        self._groups_per_step = algorithm.groups_per_step
        self._max_staleness = algorithm.max_staleness
        self._steps = cfg.run.steps
        self._n_engines = generator.n_engines
        self._capacity = max(1, generator.engine.max_num_seqs // algorithm.group_size) + 1
        self._n_dropped = 0
        self._spare = (0, 0)  # from this version on, so many
        self._pools: list[_Pool] = []  # empty until begin
        self._owner: dict[int, int] = {}
        self._outstanding: list[set[int]] = [set() for _ in range(self._n_engines)]
        self._times_lost: dict[int, int] = {}
        self._shard_of: dict[int, str] = {}  # announced group -> path
        self._shards: dict[str, dict[str, Any]] = {}  # path -> ShardRef JSON, wanted groups only
        self._done_below = 0
        self._done: set[int] = set()  # at or above _done_below

    def begin(
        self,
        next_group: int,
        n_dropped: int,
        consumed: Iterable[int],
        available: Iterable[dict[str, Any]],
        spare: int,
    ) -> None:
        """Start the cursor: every id below `next_group` is done, `available` shards count as
        announced.
        """
        if self._pools:
            raise MessageError("begin: received twice in one attempt.")
        self._n_dropped = n_dropped
        self._spare = (0, spare)
        self._done_below = next_group
        self._finish(consumed)
        if self._strict:
            n = self._n_engines
            self._pools = [_Pool(next_group + (e - next_group) % n, n) for e in range(n)]
        else:
            self._pools = [_Pool(next_group, 1)]
        for shard in available:
            self._record(shard)

    def limit(self, version: int) -> int:
        """First id that an engine with `version` installed may not be given."""
        steps = min(version + 1 + self._max_staleness, self._steps)
        from_version, spare = self._spare
        more = spare if version >= from_version else 0
        return self._groups_per_step * steps + self._n_dropped + more

    def assign(self, versions: Mapping[int, int], n_ready: int) -> set[int]:
        """Hand ids to the engines in `versions` (id -> installed version); returns those that got
        some.

        Outside strict mode the engine that owes least gets the lowest id, and no engine more than
        its part of a step among the `n_ready`: the first to install a version must not take all.
        """
        given: set[int] = set()
        if not self._pools or not versions:
            return given
        if self._strict:
            for engine, version in versions.items():
                while self._give(engine, version):
                    given.add(engine)
            return given
        if self._lowest(0) >= self.limit(max(versions.values())):
            return given
        part = -(-self._groups_per_step // max(1, n_ready))
        owing = ((len(self._outstanding[engine]), engine) for engine in versions)
        queue = [(n, engine) for n, engine in owing if n < self._capacity]
        heapq.heapify(queue)
        while queue:
            n, engine = heapq.heappop(queue)
            step = self._lowest(engine) // self._groups_per_step
            n_of_step = sum(g // self._groups_per_step == step for g in self._outstanding[engine])
            if n_of_step < part and self._give(engine, versions[engine]):
                given.add(engine)
                if n + 1 < self._capacity:
                    heapq.heappush(queue, (n + 1, engine))
        return given

    def release(self, engine: int) -> None:
        """A dead engine's unannounced groups become nobody's."""
        group_ids = sorted(self._outstanding[engine])
        self._disown(group_ids)
        for group_id in group_ids:
            heapq.heappush(self._pool(group_id).returned, group_id)

    def announce(self, shard: dict[str, Any]) -> set[int]:
        """Record a published shard; returns the engines whose outstanding groups it settled. First
        wins.
        """
        for group in shard["groups"]:
            group_id = group["group_id"]
            if not self._pools or (
                group_id >= self._pool(group_id).cursor and not self._is_settled(group_id)
            ):
                raise MessageError(
                    f"announce: group {group_id} of {shard['path']} was never assigned to anybody."
                )
        return self._record(shard)

    def consumed(
        self, group_ids: Iterable[int], dropped: list[int], version: int, spare: int
    ) -> set[int]:
        """Groups trained on and groups dropped are done; each dropped one allows a further id, and
        engines that hold `version` or a newer one may take `spare` beyond that.
        """
        self._spare = (version, spare)
        self._n_dropped += sum(not self._is_done(g) for g in set(dropped))
        return self._finish([*group_ids, *dropped])

    def lost(self, group_ids: Iterable[int]) -> None:
        """The shard of these announced groups is damaged: generate them again."""
        for group_id in group_ids:
            if group_id in self._shard_of:
                self._remove_from_shard(group_id)
                self._times_lost[group_id] = self._times_lost.get(group_id, 0) + 1
                heapq.heappush(self._pool(group_id).returned, group_id)

    def times_lost(self, engine: int) -> dict[str, int]:
        """For groups the engine owes that were lost before: how often.

        An engine may miss the view between announcing a group and owing it again; this number is
        what tells the two apart.
        """
        owed = self._outstanding[engine]
        return {str(g): n for g, n in self._times_lost.items() if g in owed}

    def outstanding(self, engine: int) -> list[int]:
        """Ids the engine owes, ascending."""
        return sorted(self._outstanding[engine])

    def shards(self) -> dict[str, dict[str, Any]]:
        """Announced shards by path, oldest first, listing only groups still to be used."""
        return dict(self._shards)

    def _pool(self, group_id: int) -> _Pool:
        return self._pools[group_id % len(self._pools)] if self._strict else self._pools[0]

    def _lowest(self, engine: int) -> int:
        """The id `_give` would hand to this engine next."""
        pool = self._pools[engine if self._strict else 0]
        while pool.returned and not self._is_free(pool.returned[0]):
            heapq.heappop(pool.returned)
        while self._is_settled(pool.cursor):
            pool.cursor += pool.stride
        return min(pool.returned[0], pool.cursor) if pool.returned else pool.cursor

    def _give(self, engine: int, version: int) -> bool:
        """Hand over the lowest id, if the engine's version allows it."""
        if self._lowest(engine) >= self.limit(version):
            return False
        group_id = self._pools[engine if self._strict else 0].take()
        self._owner[group_id] = engine
        self._outstanding[engine].add(group_id)
        return True

    def _record(self, shard: dict[str, Any]) -> set[int]:
        wanted = [g for g in shard["groups"] if not self._is_settled(g["group_id"])]
        if not wanted:
            return set()
        path = shard["path"]
        if path in self._shards:
            raise MessageError(f"announce: shard {path} was announced before with other groups.")
        self._shards[path] = {**shard, "groups": wanted}
        self._shard_of.update((g["group_id"], path) for g in wanted)
        return self._disown(g["group_id"] for g in wanted)

    def _disown(self, group_ids: Iterable[int]) -> set[int]:
        owners = {g: self._owner.pop(g) for g in group_ids if g in self._owner}
        for group_id, engine in owners.items():
            self._outstanding[engine].discard(group_id)
        return set(owners.values())

    def _finish(self, group_ids: Iterable[int]) -> set[int]:
        group_ids = list(group_ids)
        for group_id in group_ids:
            if group_id in self._shard_of:
                self._remove_from_shard(group_id)
            if group_id >= self._done_below:
                self._done.add(group_id)
        while self._done_below in self._done:
            self._done.remove(self._done_below)
            self._done_below += 1
        return self._disown(group_ids)

    def _remove_from_shard(self, group_id: int) -> None:
        path = self._shard_of.pop(group_id)
        shard = self._shards[path]
        groups = [g for g in shard["groups"] if g["group_id"] != group_id]
        if groups:
            self._shards[path] = {**shard, "groups": groups}
        else:
            del self._shards[path]

    def _is_done(self, group_id: int) -> bool:
        return group_id < self._done_below or group_id in self._done

    def _is_settled(self, group_id: int) -> bool:
        return self._is_done(group_id) or group_id in self._shard_of

    def _is_free(self, group_id: int) -> bool:
        return not self._is_settled(group_id) and group_id not in self._owner
