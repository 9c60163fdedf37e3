"""Slurm's commands as small shell scripts, which print what some site prints; put them on PATH."""

from __future__ import annotations

from pathlib import Path


def stub(folder: Path, name: str, script: str) -> Path:
    """An executable `name` in `folder` that runs a few lines of shell."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
