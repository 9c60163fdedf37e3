"""Every integration test ends with an audit of the runs it has made; broken file systems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from faults import build_shim


@pytest.fixture(autouse=True)
def _whole_runs(tmp_path: Path) -> Iterator[None]:
    yield
    runs.assert_whole(tmp_path)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `faults.run_broken` preloads."""
    return build_shim(tmp_path_factory.mktemp("shim"))
