"""The trainer ranks as one: rank 0 decides, all follow. Only the default process group is used.

Control-plane waits happen on rank 0 alone; the others wait in `share`, so rank 0 must call it often
enough for the group's time-out, which the role loop does by sharing `None` while it waits for
groups.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from slurm_grpo.control.address import host_address
from slurm_grpo.control.client import ControlClient
from slurm_grpo.weights.policy_group import make_store

T = TypeVar("T")


class Crew:
    """Makes the default process group at construction; `close` takes it down."""

    def __init__(self, client: ControlClient, device: torch.device, *, timeout_s: float) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        timeout = datetime.timedelta(seconds=timeout_s)
        if self.leads:
            self._store, address = make_store(host_address())
            client.send("trainer_store", address=address)
        else:
            address = client.wait_for(
                lambda view: view.get("trainer_store"),
                timeout_s=timeout_s,
                what="trainer-0's store",
            )
            host, port = address.rsplit(":", 1)
            self._store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore("trainer", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share(self, decide: Callable[[], T]) -> T:
        """What rank 0's `decide` returns, on every rank (pickled, between our own processes)."""
        box: list[Any] = [decide() if self.leads else None]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        shared: T = box[0]
        return shared

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in rank order, on every rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def close(self) -> None:
        dist.destroy_process_group()
