"""Hand a version of the weights to every engine: open the door, broadcast, collect the digests,
commit.

All trainer ranks call `send` together, since gathering a layer is a collective; rank 0 talks to the
control plane and broadcasts. An engine lost on the way costs one more round: a new epoch with
whoever is alive, the whole version again. A version counts only once every member has confirmed the
digest of what it received.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from slurm_grpo.config.schema import Config
from slurm_grpo.control.address import host_address
from slurm_grpo.control.client import ControlClient
from slurm_grpo.errors import DeadlineExceeded, SyncError
from slurm_grpo.trainer.crew import Crew
from slurm_grpo.trainer.hf_layers import hf_metadata, iter_hf_layers
from slurm_grpo.trainer.learner import Learner
from slurm_grpo.weights.policy_group import PolicyGroup, make_store
from slurm_grpo.weights.sender import SendResult, WeightSender

log = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""Rounds one version may take. An engine that dies costs one, so this is far above what restarts
allow."""


class PolicySync:
    """Owns the trainer's end of the policy group and its current epoch."""

    def __init__(self, cfg: Config, client: ControlClient, crew: Crew, learner: Learner) -> None:
        self._cfg = cfg
        self._client = client
        self._crew = crew
        self._learner = learner
        self._dtype: torch.dtype = getattr(torch, cfg.generator.engine.dtype)
        self._sender = WeightSender(cfg.weight_sync)
        self._group: PolicyGroup | None = None
        self._probed: tuple[int, list[float]] | None = None
        """Last version sent, and the trainer's log-probabilities of the probe under it."""
        self._probe_metrics: dict[str, float] = {}
        if crew.leads:
            self._store, self._store_address = make_store(host_address())

    def send(self, version: int) -> dict[str, float]:
        """Broadcast the current weights as `version`; returns once every engine has confirmed them.

        Returns seconds per phase, and how far the engines' log-probabilities of the probe were off
        after the previous version. Raises `SyncError` when no round succeeds and `DeadlineExceeded`
        when no engine comes to the door in time.
        """
        started = time.monotonic()
        probe = self._learner.logprobs(self._crew.share(self._wait_for_probe_tokens))
        for _ in range(MAX_ROUNDS):
            result = self._round(version)
            if result is not None:
                self._probed = (version, probe)
                return self._probe_metrics | {
                    "trainer/sync_s": time.monotonic() - started,
                    "trainer/gather_s": result.gather_s,
                    "trainer/broadcast_s": result.broadcast_s,
                    "trainer/sent_bytes": float(result.n_bytes),
                }
        raise SyncError(
            f"version {version} did not reach the engines in {MAX_ROUNDS} rounds; the reasons are "
            "above in this log."
        )

    def check_probe(self) -> dict[str, float]:
        """Compare what engines said of the last version taken with the trainer's own
        log-probabilities.

        Bytes that arrived whole may still not be what an engine computes with (a head or cache left
        stale), which only shows in its log-probabilities. Raises `SyncError` when they are further
        off than `weight_sync.max_probe_difference`.
        """
        if self._probed is None:
            return {}
        version, expected = self._probed
        limit = self._cfg.weight_sync.max_probe_difference
        worst = largest = 0.0
        for name, engine in self._client.view["engines"].items():
            stats = engine["stats"]
            if stats.get("version") != version or len(stats["probe"]) != len(expected):
                continue
            difference = np.abs(np.array(stats["probe"]) - np.array(expected))
            mean = float(difference.mean())
            worst, largest = max(worst, mean), max(largest, float(difference.max()))
            if not mean <= limit:
                raise SyncError(
                    f"{name} does not compute with version {version}: its log-probabilities of the "
                    f"probe differ by {mean:.3g} nats on average, above "
                    f"weight_sync.max_probe_difference {limit}. Read {engine['log']}"
                )
        return {
            "sync/probe_mean_abs_diff": worst,
            "sync/probe_max_abs_diff": largest,
        }

    def wait_installed(self, version: int) -> None:
        """Wait until every engine that is up generates with `version`."""

        def installed(view: dict[str, Any]) -> bool:
            ready = [e for e in view["engines"].values() if e["state"] == "ready"]
            return all(engine["version"] == version for engine in ready)

        self._client.wait_for(
            installed,
            timeout_s=self._cfg.weight_sync.door_timeout_s,
            what=f"engines to install version {version}",
        )

    def _wait_for_probe_tokens(self) -> list[int]:
        """The token ids that engines report on; they say so once they are ready."""
        cluster, sync = self._cfg.cluster, self._cfg.weight_sync
        tokens: list[int] = self._client.wait_for(
            lambda view: next((e["probe"] for e in view["engines"].values() if e["probe"]), None),
            timeout_s=sync.door_timeout_s + cluster.start_timeout_s,
            what="a first engine to be ready",
        )
        return tokens

    def _round(self, version: int) -> SendResult | None:
        """One epoch's attempt; None when it failed and another round may succeed. Same outcome on
        every rank."""
        door = self._crew.share(lambda: self._open_door(version))
        layers = iter_hf_layers(self._learner.model, self._learner.adapter, self._dtype)
        if not self._crew.leads:
            for _ in layers:
                pass
            return self._crew.share(lambda: None)
        return self._crew.share(lambda: self._transfer(door, layers, version))

    def _open_door(self, version: int) -> dict[str, Any]:
        self._client.send("open_door", version=version, store=self._store_address)

        def opened(view: dict[str, Any]) -> dict[str, Any] | None:
            door = view["door"]
            return door if door and door["version"] == version and door["go"] else None

        cluster, sync = self._cfg.cluster, self._cfg.weight_sync
        door: dict[str, Any] = self._client.wait_for(
            opened,
            timeout_s=sync.door_timeout_s + cluster.start_timeout_s,
            what=f"engines to come to the door for version {version}",
        )
        self._probe_metrics = self.check_probe()
        return door

    def _transfer(self, door: dict[str, Any], layers: Any, version: int) -> SendResult | None:
        epoch = door["epoch"]
        try:
            group = self._group_of(epoch, door["world_size"])
            result = self._sender.send(
                group,
                layers,
                hf_metadata(self._learner.model, self._learner.adapter, self._dtype),
                version,
            )
            self._wait_for_digests(epoch, version, result.digest)
        except (SyncError, DeadlineExceeded) as error:
            for _ in layers:  # the other ranks gather in step with this one
                pass
            log.warning("epoch %d: version %d not sent, trying again: %s", epoch, version, error)
            if self._group is not None:
                self._group.abandon()
                self._group = None
            self._client.send("sync_failed", epoch=epoch, version=version, reason=str(error))
            self._client.wait_for(
                lambda view: not view["door"] or view["door"]["epoch"] != epoch or None,
                timeout_s=30.0,
                what=f"epoch {epoch} to be closed",
            )
            return None
        self._client.send("commit", epoch=epoch, version=version)
        return result

    def _group_of(self, epoch: int, world_size: int) -> PolicyGroup:
        if self._group is None or self._group.epoch != epoch:
            if self._group is not None:
                self._group.abandon()
            self._group = PolicyGroup(
                self._store_address,
                epoch,
                0,
                world_size,
                self._learner.device,
                self._cfg.weight_sync.transfer_timeout_s,
            )
        return self._group

    def _wait_for_digests(self, epoch: int, version: int, digest: str) -> None:
        def outcome(view: dict[str, Any]) -> dict[str, Any] | None:
            door = view["door"]
            if not door or (door["epoch"], door["version"]) != (epoch, version):
                raise SyncError(f"epoch {epoch} was closed while version {version} was on its way")
            if door["failed"]:
                raise SyncError(f"epoch {epoch}, version {version}: {door['failed']}")
            return door if set(door["acks"]) == set(door["members"]) else None

        door = self._client.wait_for(
            outcome,
            timeout_s=self._cfg.weight_sync.transfer_timeout_s,
            what=f"every engine to confirm version {version}",
        )
        wrong = {engine: ack for engine, ack in door["acks"].items() if ack != digest}
        if wrong:
            raise SyncError(
                f"version {version}: sent digest {digest}, but received were other bytes: {wrong}"
            )
