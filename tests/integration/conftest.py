"""Every integration test ends with an audit of the runs it has made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runs


@pytest.fixture(autouse=True)
def _whole_runs(tmp_path: Path) -> Iterator[None]:
    yield
    runs.assert_whole(tmp_path)
