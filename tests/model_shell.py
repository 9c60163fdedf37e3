"""A model directory that the login node accepts: no weights, and made without torch."""

from __future__ import annotations

import json
from pathlib import Path

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def make_model_shell(path: Path) -> Path:
    """Write `config.json`, an empty safetensors file and a tokenizer of one token a byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(SHAPE))
    (path / "model.safetensors").write_bytes(b"")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path / "tokenizer.json"))
    return path
