"""A `PromptSpec` becomes the tokens an engine starts from; prompts are tokenised nowhere else.

Called in the engine process, whose tokenizer is handed in; nothing here imports one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slurm_grpo.errors import ConfigError
from slurm_grpo.tasks.base import Message, PromptSpec
from slurm_grpo.types import Prompt


def render_prompt(spec: PromptSpec, tokenizer: Any, chat_template: bool = False) -> Prompt:
    """The prompt of `spec` under a Hugging Face tokenizer.

    Messages go through its chat template, and so does a text alone if `chat_template` asks for it.
    Without a template the spec's text is used. Raises `ConfigError` when the template is needed.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    messages: list[Message] | None = spec.messages
    if messages is None and chat_template:
        messages = [{"role": "user", "content": spec.text or ""}]
    if messages is not None and (has_template or spec.text is None or chat_template):
        if not has_template:
            raise ConfigError(
                f"task {spec.task}: the prompt is a chat, but the model's tokenizer has no chat "
                "template. Use an instruction-tuned model, or rows whose prompt is a text."
            )
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template wrote the special tokens itself.
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        text = spec.text or ""
        token_ids = tokenizer(text)["input_ids"]
    return Prompt(
        task=spec.task,
        text=text,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        target=spec.target,
    )


def check_fits(prompt: Prompt, *, max_new_tokens: int, max_tokens: int) -> None:
    """Raise `ConfigError` when prompt plus longest completion exceed `max_tokens`."""
    n = len(prompt.token_ids)
    if n == 0:
        raise ConfigError(f"task {prompt.task}: a prompt has no tokens: {prompt.text!r}")
    if n + max_new_tokens > max_tokens:
        raise ConfigError(
            f"task {prompt.task}: a prompt of {n} tokens plus generator.sampling.max_new_tokens = "
            f"{max_new_tokens} exceeds {max_tokens} tokens. Raise generator.engine.max_model_len "
            f"and trainer.tokens_per_microbatch to {n + max_new_tokens}, or remove the prompt that "
            f"begins {prompt.text[:80]!r}"
        )
