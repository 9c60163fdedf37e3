"""The engine worker's end of the policy group: receive a version into staging, and later load it
into the model.

The two are apart because a version only counts once the sender has committed it: `receive` touches
staging alone, so a transfer that fails leaves the model as it was. `install` runs vLLM's own
weight-update lifecycle over the staged bytes. Importing this module registers the backend, which
every worker does through `worker_extension_cls`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from slurm_grpo.errors import DeadlineExceeded, SlurmGrpoError, SyncError
from slurm_grpo.weights.layout import (
    HEADER_FIELDS,
    Layout,
    bucket_digest,
    decode_layout,
    digest_text,
)
from slurm_grpo.weights.policy_group import Pipeline, PolicyGroup

BACKEND = "slurm_grpo"


@dataclass
class PolicyInitInfo(WeightTransferInitInfo):
    """Which policy group to join."""

    store_address: str
    epoch: int
    first_rank: int
    """Group rank of this engine's worker 0."""
    world_size: int
    timeout_s: float


@dataclass
class PolicyUpdateInfo(WeightTransferUpdateInfo):
    """Which staged version to load."""

    version: int


class PolicyWeightTransfer(WeightTransferEngine[PolicyInitInfo, PolicyUpdateInfo]):
    """vLLM's weight-transfer backend over a `PolicyGroup`, gloo and NCCL alike."""

    init_info_cls = PolicyInitInfo
    update_info_cls = PolicyUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: PolicyGroup | None = None
        self._timeout_s = 0.0
        self._layout: Layout | None = None
        self._staging: Tensor | None = None
        self._staged_version: int | None = None
        self._arrived = 0.0  # when the last bucket did, time.monotonic
        self._parameters = {name for name, _ in self.model.named_parameters()}

    def init_transfer_engine(self, init_info: PolicyInitInfo) -> None:
        """Join the group of an epoch; nothing happens when already in it."""
        self._timeout_s = init_info.timeout_s
        group = self._group
        if group and (group.store_address, group.epoch) == (
            init_info.store_address,
            init_info.epoch,
        ):
            return
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        self._group = PolicyGroup(
            init_info.store_address,
            init_info.epoch,
            rank,
            init_info.world_size,
            self.device,
            init_info.timeout_s,
        )

    def receive(self, version: int) -> dict[str, Any]:
        """Take part in one transfer, into staging; the model is not touched. Raises SyncError,
        DeadlineExceeded.

        After a failure the group and the staging buffer are given up, since an operation may still
        write there.
        """
        started = self._arrived = time.monotonic()
        self._staged_version = None
        group = self._group
        if group is None:
            raise SyncError(
                f"weights: version {version} cannot be received outside a policy group; "
                "join one first."
            )
        try:
            digests = self._receive_stream(group, version, started + self._timeout_s)
        except SlurmGrpoError:
            self.shutdown()
            self._staging = None
            raise
        assert self._layout is not None
        self._staged_version = version
        return {
            "digest": digest_text(digests),
            "n_bytes": self._layout.n_bytes,
            "transfer_s": self._arrived - started,
            "verify_s": time.monotonic() - self._arrived,
        }

    def _receive_stream(self, group: PolicyGroup, version: int, deadline: float) -> Tensor:
        layout = self._receive_layout(group, version, deadline)
        staging = self._staging
        if staging is None or len(staging) < layout.n_bytes:
            staging = self._staging = torch.empty(
                layout.n_bytes, dtype=torch.uint8, device=self.device
            )
        pipeline = Pipeline(group, 2 * layout.bucket_bytes, deadline)
        buckets = [staging[start:end] for start, end in layout.buckets]
        for bucket in buckets:
            pipeline.push(bucket)
        for _ in pipeline.drain():
            pass
        self._arrived = time.monotonic()
        # Not while they arrive: on a CPU that stops the threads that receive.
        received = torch.stack([bucket_digest(bucket) for bucket in buckets])
        sent = torch.empty_like(received)
        group.broadcast(sent, deadline=deadline)
        if wrong := (sent != received).any(dim=1).nonzero().flatten().tolist():
            raise SyncError(
                f"weights: version {version} arrived damaged at {group}: digests differ in "
                f"{len(wrong)} of {len(buckets)} buckets, first {wrong[0]}. The model keeps its "
                "weights; send again."
            )
        return received

    def _receive_layout(self, group: PolicyGroup, version: int, deadline: float) -> Layout:
        header = torch.empty(HEADER_FIELDS, dtype=torch.int64, device=self.device)
        group.broadcast(header, deadline=deadline)
        sent_version, n_metadata_bytes, bucket_bytes = header.tolist()
        encoded = torch.empty(n_metadata_bytes, dtype=torch.uint8, device=self.device)
        group.broadcast(encoded, deadline=deadline)
        if sent_version != version:
            raise SyncError(
                f"weights: {group} was told to expect version {version}, "
                f"but {sent_version} was sent."
            )
        metadata = encoded.cpu().numpy().tobytes()
        if self._layout is None or (self._layout.encoded, self._layout.bucket_bytes) != (
            metadata,
            bucket_bytes,
        ):
            self._layout = decode_layout(metadata, bucket_bytes)
        return self._layout

    def start_weight_update(self) -> None:
        """Put vLLM's layers into their reloading state."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. The base class's method would synchronise an accelerator, which
        a CPU lacks.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: PolicyUpdateInfo) -> None:
        """Load the staged version into the model; on any failure leave the layers ready for another
        try.
        """
        try:
            if (
                self._staged_version != update_info.version
                or self._layout is None
                or self._staging is None
            ):
                raise SyncError(
                    f"weights: version {update_info.version} is not in staging, which holds "
                    f"{self._staged_version}. Receive it first."
                )
            loaded = self.model.load_weights(iter(self._layout.views(self._staging)))
            if missing := self._parameters - set(loaded):
                raise SyncError(
                    f"weights: the transfer lacks {len(missing)} parameters, first {min(missing)}."
                )
        except BaseException:
            self._finalize()  # else the layers stay on the meta device and no retry can succeed
            raise

    def finish_weight_update(self) -> None:
        """Put the layers back into service."""
        self._finalize()

    def _finalize(self) -> None:
        with _errors_only(
            "vllm.model_executor.model_loader.reload.layerwise"
        ):  # it warns about every tied head
            finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On CPUs an output head tied to the embeddings would keep its old prepacked weights.
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the policy group."""
        if self._group is not None:
            self._group.abandon()
            self._group = None


class PolicyWorkerExtension:
    """Methods that vLLM adds to every worker, called by `Engine` through `collective_rpc`.

    They return errors rather than raise them, because an exception loses its class on the way from
    a tensor-parallel worker's process.
    """

    weight_transfer_engine: PolicyWeightTransfer

    def receive_policy(self, init_info: dict[str, Any], version: int) -> dict[str, Any]:
        """Join the epoch's group if necessary and receive `version` into staging."""
        backend = self.weight_transfer_engine
        try:
            backend.init_transfer_engine(backend.parse_init_info(init_info))
            return backend.receive(version)
        except SlurmGrpoError as error:
            return {"error": str(error), "deadline": isinstance(error, DeadlineExceeded)}

    def install_policy(self, version: int) -> dict[str, Any]:
        """Run one weight update of vLLM's lifecycle with the staged version."""
        started = time.monotonic()
        worker: Any = self
        try:
            worker.start_weight_update()
            worker.update_weights({"version": version})
            worker.finish_weight_update()
        except (
            RuntimeError,
            ValueError,
            KeyError,
            AttributeError,
            AssertionError,
            SlurmGrpoError,
        ) as error:
            return {"error": f"{type(error).__name__}: {error}", "deadline": False}
        return {"load_s": time.monotonic() - started}


@contextmanager
def _errors_only(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, PolicyWeightTransfer)
