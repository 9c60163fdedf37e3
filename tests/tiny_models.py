"""Random tiny Hugging Face model directories, made on the spot: no hub, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "llama_untied", "qwen3"]

_COMMON: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=258,
    initializer_range=0.2,
)


def make_tiny_model(path: Path, family: Family = "llama", *, seed: int = 0) -> Path:
    """Write a model of some 0.1 M float32 parameters with a byte-level tokenizer; returns `path`.

    Head size 32 (vLLM's CPU attention accepts multiples of 32). `llama` ties its embeddings, the
    others do not.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

    if family == "qwen3":
        config: Any = Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=False, rope_theta=1e4)
    else:
        config = LlamaConfig(
            **_COMMON,
            head_dim=32,
            tie_word_embeddings=family == "llama",
            rope_theta=1e4,
            attention_bias=False,
        )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(path)
    return path
