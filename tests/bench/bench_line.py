"""The one JSON line that every benchmark ends with: its numbers, and where they were measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_grpo.run.versions import installed_versions


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory, and how busy the machine has been."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def print_bench_line(name: str, values: dict[str, Any]) -> None:
    """Print `values` with the commit, hardware and versions beside them."""
    line = {"bench": name, **values, "hardware": hardware(), "versions": installed_versions()}
    print(json.dumps(line), flush=True)
