"""Which Hugging Face model directories can be trained: reads `config.json`, imports nothing heavy.

The login node asks before anything is allocated; the trainer builds its model from the same
`ModelShape`. Knows nothing about torch or about how weights are stored beyond their file names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slurm_grpo.errors import ConfigError

Family: TypeAlias = Literal["llama", "qwen3"]

SUPPORTED: dict[str, Family] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_LLAMA3_ROPE_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a checkpoint's `config.json` says about its transformer."""

    family: Family
    vocab_size: int
    dim: int
    hidden_dim: int  # of the feed-forward
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    """Also that of the query and key norms (qwen3)."""
    tied: bool
    """The output head is the embedding matrix; checkpoints then hold no `lm_head.weight`."""
    rope_theta: float
    rope_llama3: dict[str, float] | None
    """The four numbers of llama 3's frequency scaling, by their Hugging Face names; None: unscaled.
    """


def check_model_dir(path: str | Path) -> list[str]:
    """Every reason why `path` cannot be trained, one sentence each; empty when it can."""
    root = Path(path)
    if not root.is_dir():
        return [
            f"{root}: no such directory. Give a Hugging Face model directory on this machine; "
            "nothing is downloaded (launch/quickstart.sh prepares the quickstart's model)."
        ]
    try:
        config = json.loads((root / "config.json").read_text())
    except (OSError, ValueError) as error:
        return [
            f"{root}/config.json cannot be read ({error}). Expected a Hugging Face model directory."
        ]
    problems = [f"{root}/config.json: {problem}" for problem in _config_problems(config)]
    if not any(root.glob("*.safetensors")):
        problems.append(f"{root}: no *.safetensors file; convert the weights with save_pretrained.")
    if not any(
        (root / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        problems.append(f"{root}: no tokenizer (tokenizer.json); save it next to the weights.")
    return problems


def read_model_shape(path: str | Path) -> ModelShape:
    """The shape of the model in `path`; raises `ConfigError` naming all that is unsupported about
    it.
    """
    if problems := check_model_dir(path):
        raise ConfigError("model.path cannot be trained:\n" + "\n".join(f"  {p}" for p in problems))
    config = json.loads((Path(path) / "config.json").read_text())
    family = SUPPORTED[config["architectures"][0]]
    n_heads = config["num_attention_heads"]
    rope = _rope(config)
    return ModelShape(
        family=family,
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=_head_dim(config, family),
        max_position_embeddings=config["max_position_embeddings"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_llama3={key: float(rope[key]) for key in _LLAMA3_ROPE_KEYS}
        if _rope_type(rope) == "llama3"
        else None,
    )


def _config_problems(config: dict[str, Any]) -> list[str]:
    architectures = config.get("architectures") or ["none named"]
    if architectures[0] not in SUPPORTED:
        return [
            f"architecture {architectures[0]} is not supported; supported: {', '.join(SUPPORTED)}."
        ]
    family = SUPPORTED[architectures[0]]
    if missing := [key for key in _REQUIRED if not isinstance(config.get(key), int)]:
        return [f"{', '.join(missing)} missing or not an integer."]
    problems = []
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']}; only silu is supported.")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            problems.append(f"{key} is true; only false is supported.")
    if config.get("quantization_config"):
        problems.append(
            "the weights are quantised (quantization_config); use the unquantised model."
        )
    if _head_dim(config, family) % 2:
        problems.append(f"head_dim is {_head_dim(config, family)}; rotary embeddings need it even.")
    return problems + _rope_problems(_rope(config), family)


def _rope_problems(rope: dict[str, Any], family: Family) -> list[str]:
    kind = _rope_type(rope)
    accepted = ("default", "llama3") if family == "llama" else ("default",)
    if kind not in accepted:
        return [
            f"rope scaling {kind} is not supported for {family}; supported: {', '.join(accepted)}."
        ]
    if kind == "llama3" and (missing := [key for key in _LLAMA3_ROPE_KEYS if key not in rope]):
        return [f"rope scaling llama3 lacks {', '.join(missing)}."]
    return []


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """One dictionary for both layouts: `rope_parameters` (transformers 5), or `rope_theta` and
    `rope_scaling`.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _head_dim(config: dict[str, Any], family: Family) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    if family == "qwen3":
        return 128  # Qwen3Config's default; it does not derive it from hidden_size
    return int(config["hidden_size"] // config["num_attention_heads"])
