"""Broken file systems, for the tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `faults.run_broken` preloads."""
    return build_shim(tmp_path_factory.mktemp("shim"))
