"""Builds the trained model from a Hugging Face directory: torchtitan modules, FSDP2, weights
through torchtitan's state-dict adapter. Works with one rank or many, on CPU (gloo) and CUDA (NCCL);
knows nothing of losses or batches.

Axes: B batch (always 1), T tokens of a pack, D model width, N positions whose next token is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from slurm_grpo.config.model_support import ModelShape, read_model_shape
from slurm_grpo.config.schema import TrainerConfig
from slurm_grpo.errors import ConfigError
from slurm_grpo.trainer import titan
from slurm_grpo.trainer.attention import PackMask, inner_attention_config
from slurm_grpo.trainer.head import ChunkLoss, LossHead

_NO_INIT: dict[str, Any] = {"weight": titan.skip_param_init}  # every weight is loaded
FORWARD_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _Policy:
    """Replaces the forward of torchtitan's decoders: a pack goes in, a loss comes out."""

    tok_embeddings: nn.Module
    layers: nn.ModuleDict
    norm: nn.Module
    lm_head: LossHead

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        mask: PackMask,
        predict_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_loss: ChunkLoss | None,
    ) -> Tensor:
        """`predict_N` are the pack indices whose hidden states predict `targets_N`; see `LossHead`
        for the rest.
        """
        h_BTD = self.tok_embeddings(token_ids_T[None])
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, mask, positions_T[None])
        h_ND = self.norm(h_BTD[0].index_select(0, predict_N))
        loss: Tensor = self.lm_head(h_ND, targets_N, temperature, chunk_loss)
        return loss


class LlamaPolicy(_Policy, titan.Llama3Model):
    """Llama family."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Llama3Model.Config):
        pass


class Qwen3Policy(_Policy, titan.Qwen3Model):
    """Qwen3 family, dense."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Qwen3Model.Config):
        pass


class CpuRMSNorm(titan.RMSNorm):
    """Normalises in float32: the CPU kernel for bfloat16 takes four times as long."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        wide = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return wide.to(x.dtype)


def build_model(model_dir: Path, cfg: TrainerConfig, device: torch.device) -> nn.Module:
    """The model of `model_dir`, sharded over the default process group, float32 masters, weights
    loaded.

    A collective. Raises `ConfigError` for a model that is not supported.
    """
    shape = read_model_shape(model_dir)
    with torch.device("meta"):
        model: nn.Module = build_model_config(shape, cfg, device).build()
    if cfg.activation_checkpointing:
        titan.FullAC.Config().build(dump_folder="").apply(model)
    _shard(model, cfg, device)
    model.to_empty(device=device)
    with torch.no_grad():
        init_states: Any = model.init_states
        init_states(buffer_device=device)
    _load_weights(model, build_adapter(model, model_dir), model_dir)
    return model


def build_adapter(model: nn.Module, model_dir: Path) -> titan.StateDictAdapter:
    """torchtitan's converter between its own and Hugging Face names, for any part of what `units`
    yields.

    It is told that nothing is tied: `units` leaves a tied head out, and the adapters otherwise want
    both together.
    """
    qwen3 = isinstance(model, titan.Qwen3Model)
    adapter = titan.Qwen3StateDictAdapter if qwen3 else titan.Llama3StateDictAdapter
    config: Any = model.config
    return adapter(replace(config, enable_weight_tying=False), str(model_dir))


def build_model_config(shape: ModelShape, cfg: TrainerConfig, device: torch.device) -> Any:
    """torchtitan's configuration of the model: its flavors are hard-coded, so each part is stated
    here.
    """
    # Positions end with prompt plus completion, which the budget bounds; the rotary cache is kept
    # per layer.
    rope = _rope_config(shape, min(shape.max_position_embeddings, cfg.tokens_per_microbatch))
    slow_norm = device.type == "cpu" and cfg.forward_dtype == "bfloat16"
    norm_class = CpuRMSNorm if slow_norm else titan.RMSNorm

    def norm(size: int) -> Any:
        return norm_class.Config(normalized_shape=size, eps=shape.norm_eps, param_init=_NO_INIT)

    qwen3 = shape.family == "qwen3"
    block = titan.Qwen3TransformerBlock if qwen3 else titan.Llama3TransformerBlock
    layers = [
        block.Config(
            attention_norm=norm(shape.dim),
            ffn_norm=norm(shape.dim),
            attention=titan.make_gqa_config(
                dim=shape.dim,
                n_heads=shape.n_heads,
                n_kv_heads=shape.n_kv_heads,
                head_dim=shape.head_dim,
                wqkv_param_init=_NO_INIT,
                wo_param_init=_NO_INIT,
                inner_attention=inner_attention_config(device),
                qk_norm=norm(shape.head_dim) if qwen3 else None,
                rope=rope,
            ),
            feed_forward=titan.make_ffn_config(
                dim=shape.dim,
                hidden_dim=shape.hidden_dim,
                w1_param_init=_NO_INIT,
                w2w3_param_init=_NO_INIT,
            ),
        )
        for _ in range(shape.n_layers)
    ]
    policy = Qwen3Policy if qwen3 else LlamaPolicy
    return policy.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=titan.Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=_NO_INIT
        ),
        norm=norm(shape.dim),
        lm_head=LossHead.Config(
            in_features=shape.dim, out_features=shape.vocab_size, param_init=_NO_INIT
        ),
        layers=layers,
        enable_weight_tying=shape.tied,
    )


def _rope_config(shape: ModelShape, max_seq_len: int) -> Any:
    common: dict[str, Any] = {
        "dim": shape.head_dim,
        "max_seq_len": max_seq_len,
        "theta": shape.rope_theta,
    }
    if shape.family == "qwen3":
        return titan.CosSinRoPE.Config(**common)
    llama3 = shape.rope_llama3
    if llama3 is None:
        return titan.ComplexRoPE.Config(**common)
    return titan.ComplexRoPE.Config(
        **common,
        scaling="llama",
        scaling_factor=llama3["factor"],
        low_freq_factor=llama3["low_freq_factor"],
        high_freq_factor=llama3["high_freq_factor"],
        original_max_position_embeddings=int(llama3["original_max_position_embeddings"]),
    )


def _shard(model: nn.Module, cfg: TrainerConfig, device: torch.device) -> None:
    n_ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n_ranks,), mesh_dim_names=("fsdp",))
    titan.apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=FORWARD_DTYPES[cfg.forward_dtype],
        reduce_dtype=torch.float32,
        pp_enabled=False,
        # One rank has nothing to free, and gathering again for the backward would cast everything
        # again.
        reshard_after_forward_policy="never" if n_ranks == 1 else "default",
    )
    if n_ranks == 1:
        for module in _fsdp_modules(model):
            # torchtitan's factor of 1.0 would still be divided by, in a pass over every gradient.
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    if device.type == "cpu":
        for module in _fsdp_modules(model):
            # gloo has no PREMUL_SUM, which FSDP uses for scaled reductions.
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Drop gathered weights. Needed after a forward without backward: they would outlive the next
    weight change.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The sharded parameters by names that do not depend on activation checkpointing; a tied one
    once.
    """
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
    }


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def units(model: nn.Module) -> list[dict[str, Tensor]]:
    """The sharded weights by torchtitan's names: embeddings, each layer, final norm with the head,
    in forward order.

    What is moved between formats moves unit by unit, so that whole models are never held twice. A
    tied head is left out: it is the embeddings.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.enable_weight_tying:
            continue
        key = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        key = "head" if key in ("norm", "lm_head") else key
        parts.setdefault(key, {})[name] = tensor
    return list(parts.values())


def _load_weights(model: nn.Module, adapter: titan.StateDictAdapter, model_dir: Path) -> None:
    for unit in units(model):
        # llama's adapter reorders query and key rows, which it cannot do on unevenly sharded heads.
        target = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            if name.endswith((".wq.weight", ".wk.weight"))
            else tensor
            for name, tensor in unit.items()
        }
        hf_target = adapter.to_hf(dict(target))
        try:
            load(hf_target, storage_reader=adapter.get_hf_storage_reader(str(model_dir)))
        except (CheckpointException, RuntimeError) as error:
            raise ConfigError(
                f"{model_dir}: its weights do not fit its config.json ({error})."
            ) from error
        for name, loaded in adapter.from_hf(hf_target).items():
            _copy_into(unit[name], loaded)


@torch.no_grad()
def _copy_into(target: Tensor, loaded: Tensor) -> None:
    if isinstance(loaded, DTensor) or not isinstance(target, DTensor):
        if loaded is not target:
            target.copy_(loaded)
        return
    whole = loaded.to(target.device)
    mesh, placements = target.device_mesh, target.placements
    # Every rank has read the whole tensor, so nobody needs to send.
    local = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    target.copy_(local)
