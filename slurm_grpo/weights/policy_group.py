"""The policy group: the sending trainer rank and every engine worker, the only bridge between the
two sides.

A gloo (CPU) or NCCL (GPU) process group built directly over a TCPStore prefix; it neither needs nor
touches the default group, which belongs to torchtitan or to vLLM. A group lives for one *epoch*:
after any failure it is abandoned and the survivors form the next one. Every operation ends at our
own deadline. Knows nothing about weights.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from slurm_grpo.control.address import host_address
from slurm_grpo.errors import DeadlineExceeded, SlurmGrpoError, SyncError

FORMING_S = 30.0
"""Longest wait for the other members of a group: all of them are at the door when it is formed."""


def make_store(host: str) -> tuple[TCPStore, str]:
    """Serve a TCPStore on a free port; returns it (keep it alive) and its `host:port`."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


class PolicyGroup:
    """One epoch's process group. Rank 0 is the sender.

    Construction is collective: it returns once all `world_size` members have come, or raises. An
    epoch number is never used twice on a store.
    """

    def __init__(
        self,
        store_address: str,
        epoch: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.store_address = store_address
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self._pending: list[Broadcast] = []
        self._closed = False
        self._group: Any = None
        # In a thread, since NCCL connects without a deadline and cannot be told to stop.
        formed: Future[None] = Future()
        threading.Thread(
            target=self._form, args=(formed,), daemon=True, name="policy-group-forming"
        ).start()
        try:
            formed.result(timeout_s)
        except (RuntimeError, TimeoutError) as error:
            self.abandon()
            raise self._failure(f"forming it over the store at {store_address}", error) from error

    def _form(self, formed: Future[None]) -> None:
        """Connect to everybody, and prove it: a group that exists has carried a first broadcast."""
        try:
            host, port = self.store_address.rsplit(":", 1)
            patience = timedelta(seconds=min(self.timeout_s / 2, FORMING_S))
            store = TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=patience
            )
            prefix = PrefixStore(f"epoch{self.epoch}", store)
            prefix.set(f"member{self.rank}", "here")
            prefix.wait([f"member{rank}" for rank in range(self.world_size)], patience)
            build = _build_nccl if self.device.type == "cuda" else _build_gloo
            timeout = timedelta(seconds=self.timeout_s)
            self._group = group = build(prefix, self.rank, self.world_size, timeout)
            first = torch.zeros(1, device=self.device)
            group.broadcast([first], dist.BroadcastOptions()).wait()
            first.item()  # NCCL's wait only orders streams
            formed.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            formed.set_exception(error)

    def broadcast(self, tensor: Tensor, *, deadline: float | None = None) -> None:
        """Send `tensor` (rank 0) or overwrite it (others); blocks until done, at most until the
        deadline.
        """
        self.start_broadcast(tensor, deadline=deadline).wait()

    def start_broadcast(self, tensor: Tensor, *, deadline: float | None = None) -> Broadcast:
        """Like `broadcast`, without waiting: leave the tensor alone until the result's `wait` has
        returned.

        `deadline` is on `time.monotonic`'s clock; without one the operation may take `timeout_s`.
        """
        if self._closed:
            raise SyncError(f"{self}: already abandoned. Form the next epoch.")
        remaining_s = self.timeout_s if deadline is None else deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(
                f"{self}: the transfer's deadline passed before a broadcast began."
            )
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=remaining_s)
        ends = time.monotonic() + remaining_s
        watcher = _watch(self._group, remaining_s) if self.device.type == "cuda" else None
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            if watcher is not None:
                watcher.cancel()
            raise self._failure("starting a broadcast", error) from error
        broadcast = Broadcast(self, work, tensor, watcher, remaining_s, ends)
        self._pending.append(broadcast)
        return broadcast

    def abandon(self) -> None:
        """Leave the group at once, whatever state it is in; never blocks.

        gloo cannot cancel a pending operation, so group and operations are handed to a daemon
        thread that sees them to their end. A process with one pending leaves by `os._exit`.
        """
        if self._closed:
            return
        self._closed = True
        group, self._group = self._group, None
        pending, self._pending = self._pending, []
        threading.Thread(
            target=_bury, args=(group, pending), daemon=True, name="policy-group-burial"
        ).start()

    def _finished(self, broadcast: Broadcast) -> None:
        if broadcast in self._pending:
            self._pending.remove(broadcast)

    def _failure(
        self, doing: str, error: Exception, limit_s: float | None = None
    ) -> SlurmGrpoError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        limit_s = self.timeout_s if limit_s is None else limit_s
        text = f"{self}: {doing} failed (deadline {limit_s:.0f} s): {reason}"
        kind = (
            DeadlineExceeded
            if "timed out" in reason.lower() or "timeout" in reason.lower()
            else SyncError
        )
        return kind(f"{text}. A member may have died; the next epoch is formed without it.")

    def __str__(self) -> str:
        return f"policy group epoch {self.epoch}, rank {self.rank} of {self.world_size}"


@dataclass(eq=False, slots=True)
class Broadcast:
    """An operation under way."""

    _group: PolicyGroup
    _work: Any
    _tensor: Tensor
    _watcher: threading.Timer | None
    _limit_s: float
    _ends: float  # on time.monotonic's clock

    def wait(self) -> None:
        """Block until the operation is done; raises SyncError or DeadlineExceeded."""
        try:
            self._work.wait()
            if self._watcher is not None:
                # NCCL's wait only orders streams: bytes or an abort are seen after this.
                torch.cuda.current_stream(self._tensor.device).synchronize()
        except RuntimeError as error:
            raise self._group._failure("a broadcast", error, self._limit_s) from error
        finally:
            # By the clock: the operation ends before the watcher's abort has returned.
            aborted = self._watcher is not None and time.monotonic() >= self._ends
            if self._watcher is not None:
                self._watcher.cancel()
            self._group._finished(self)
        if aborted:
            raise DeadlineExceeded(
                f"{self._group}: a broadcast was aborted at its deadline, {self._limit_s:.0f} s."
            )

    def bury(self) -> None:
        """See the operation to its end, however it ends."""
        try:
            self._work.wait()
        except RuntimeError:
            return


class Pipeline:
    """Broadcasts one after the other, with at most `max_bytes` (but at least one) under way."""

    def __init__(self, group: PolicyGroup, max_bytes: int, deadline: float) -> None:
        self._group = group
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._under_way: deque[tuple[Broadcast, Tensor]] = deque()
        self._n_bytes = 0

    def push(self, data: Tensor) -> list[Tensor]:
        """Start the broadcast of `data`; returns the tensors whose broadcasts had to end first."""
        done = []
        while self._under_way and self._n_bytes + data.nbytes > self._max_bytes:
            done.append(self._wait_for_oldest())
        broadcast = self._group.start_broadcast(data, deadline=self._deadline)
        self._under_way.append((broadcast, data))
        self._n_bytes += data.nbytes
        return done

    def drain(self) -> Iterator[Tensor]:
        """Every tensor still under way, each as it is done."""
        while self._under_way:
            yield self._wait_for_oldest()

    def _wait_for_oldest(self) -> Tensor:
        broadcast, data = self._under_way.popleft()
        broadcast.wait()
        self._n_bytes -= data.nbytes
        return data


def _build_gloo(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # By address: a host name may resolve to loopback, and the group would bind there.
    options._devices = [gloo.create_device(hostname=host_address())]
    return gloo(store, rank, world_size, options)


def _build_nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = 2 * timeout  # our watcher comes first
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    others = os.environ.get(name, "3")  # 3 is torch's default
    os.environ[name] = "0"  # else a failure tears the whole process down
    try:
        return nccl(store, rank, world_size, options)
    finally:
        os.environ[name] = others


def _watch(group: Any, limit_s: float) -> threading.Timer:
    """Abort an NCCL group at our deadline; cancelled by the operation's `wait`."""
    timer = threading.Timer(limit_s, group.abort)
    timer.daemon = True
    timer.start()
    return timer


def _bury(group: Any, pending: list[Broadcast]) -> None:
    if hasattr(dist, "ProcessGroupNCCL") and isinstance(group, dist.ProcessGroupNCCL):
        group.abort()  # `shutdown` would hang on a broken group
        return
    for broadcast in pending:
        broadcast.bury()
