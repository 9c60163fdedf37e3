"""The text of each token of a completion, for views that mark single tokens.

Shards hold token ids and whole texts; which letters belong to which token only the tokenizer knows.
It is read from the model's directory or from the run's own exports, with the `tokenizers` package;
where one of them is missing, readers do without.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_grpo.run.directory import RunDir

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that do not end a character yet."""


def load_tokenizer(run: RunDir, model_path: str | None) -> Any | None:
    """The model's `tokenizers.Tokenizer`, or that of the run's newest export; None without the
    package or a file."""
    exports = sorted(run.hf_exports.glob("step_*"), reverse=True)
    folders = [Path(model_path), *exports] if model_path else exports
    paths = [f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()]
    if not paths or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(paths[0]))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The piece of text that each token adds; joined, they are the completion with its special
    tokens. A token that ends inside a character adds nothing: the one that completes it does."""
    ids, pieces = list(token_ids), []
    # Decoded from `start`, a settled token before those of interest, since the first token of a
    # text may lose its leading space; `settled` tokens have been given their piece.
    start = settled = 0
    for stop in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:settled], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:stop], skip_special_tokens=False)
        if text.endswith(_UNFINISHED) and stop < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, settled = settled, stop
    return pieces
