"""Publish and read a quickstart step: 8 groups of 8 episodes, 90 prompt and 12 completion tokens;
and publish shards of several shapes beside a plain write and fsync of the same bytes.

`python tests/bench/bench_staging.py [--dir DIR]` prints one JSON line; DIR is a folder on the file
system to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/bench")]

from bench_line import spread  # noqa: E402
from sample_episodes import make_group, make_header, make_run  # noqa: E402
from slurm_grpo.staging import layout  # noqa: E402
from slurm_grpo.staging.manifest import Manifest, publish_manifest  # noqa: E402
from slurm_grpo.staging.shards import publish_groups, read_groups, verify_shard  # noqa: E402
from slurm_grpo.supervisor.environment import KEEPS_FREED_MEMORY  # noqa: E402

QUICKSTART_STEP_S = 5.0
N_REPEATS = 40
SHAPES = ((8, 12), (625, 200), (64, 1000), (32, 8000), (64, 8000))
"""Groups of 8 episodes, and tokens of each completion."""
N_PAIRS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=None, help="file system to measure (default: temporary)")
    folder_above = parser.parse_args().dir
    if not KEEPS_FREED_MEMORY.keys() <= os.environ.keys():  # as an engine process has it
        os.execve(sys.executable, [sys.executable, *sys.argv], KEEPS_FREED_MEMORY | os.environ)
    with ThreadPoolExecutor(1) as thread:  # of its own, as an engine's publisher has
        result = thread.submit(run_all, folder_above).result()
    print(json.dumps(result))


def run_all(folder_above: str | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=folder_above) as folder:
        cpu_start = time.process_time()
        seconds, size_bytes = measure(Path(folder))
        cpu_s = (time.process_time() - cpu_start) / (N_REPEATS + 1)
        beside_plain = {
            f"{n_groups} x 8 x {n_tokens} tokens": compare(Path(folder), n_groups, n_tokens)
            for n_groups, n_tokens in SHAPES
        }
    parts = (seconds["publish"], seconds["verify"], seconds["read"])
    total = statistics.median(map(sum, zip(*parts, strict=True)))
    return {
        "bench": "staging",
        "commit": _git_commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "h5py": h5py.version.version,
            "hdf5": h5py.version.hdf5_version,
            "numpy": np.__version__,
        },
        "n_episodes": 64,
        "shard_bytes": size_bytes,
        "ms": {name: _spread(values) for name, values in seconds.items()},
        "publish_verify_read_ms_median": round(1e3 * total, 2),
        "beside_plain_write_and_fsync": beside_plain,
        "cpu_ms_mean": round(1e3 * cpu_s, 2),  # all four; tells a busy machine from slow code
        "load_average": os.getloadavg()[0],
        "share_of_quickstart_step": round(total / QUICKSTART_STEP_S, 5),
    }


def measure(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Seconds of every part of a shard's way, once per repeat, after one unmeasured warm-up."""
    run = make_run(folder)
    groups = [
        make_group(i, n_episodes=8, n_prompt_tokens=90, n_tokens=12, oldest_version=1)
        for i in range(8)
    ]
    header = make_header()
    seconds: dict[str, list[float]] = {"publish": [], "verify": [], "manifest": [], "read": []}

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        seconds[name].append(time.perf_counter() - start)

    ref = publish_groups(run, groups, header)
    for n in range(1, N_REPEATS + 2):
        header = replace(header, sequence=n)

        def publish() -> None:
            nonlocal ref
            ref = publish_groups(run, groups, header)  # noqa: B023

        timed("publish", publish)
        timed("verify", lambda: verify_shard(run, ref))
        chosen = tuple((g.group_id, ref.path) for g in ref.groups)
        manifest = Manifest(step=n, attempt=0, groups=chosen, dropped=())
        timed("manifest", lambda: publish_manifest(run, manifest))  # noqa: B023
        timed("read", lambda: read_groups(run, ref, range(8)))
    return {name: values[1:] for name, values in seconds.items()}, ref.size_bytes


def compare(folder: Path, n_groups: int, n_tokens: int) -> dict[str, object]:
    """Publish, then write the same bytes to another new file, in turns; the share of the plain
    write's speed that publishing reaches, and what of its time goes into columns (Python) and into
    the image of a file (h5py).
    """
    run = make_run(folder / f"{n_groups}-{n_tokens}")
    groups = [
        make_group(i, n_episodes=8, n_prompt_tokens=90, n_tokens=n_tokens, oldest_version=1)
        for i in range(n_groups)
    ]
    header = make_header()
    taken: dict[str, list[float]] = {"publish": [], "plain": [], "columns": [], "image": []}
    size_bytes = 0
    for n in range(N_PAIRS + 1):
        header = replace(header, sequence=n)
        start = time.perf_counter()
        ref = publish_groups(run, groups, header)
        taken["publish"].append(time.perf_counter() - start)
        path = run.root / ref.path
        data, size_bytes = path.read_bytes(), ref.size_bytes
        start = time.perf_counter()
        with path.with_suffix(".plain").open("xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        taken["plain"].append(time.perf_counter() - start)
        start = time.perf_counter()
        columns = layout.build_columns(groups)
        taken["columns"].append(time.perf_counter() - start)
        start = time.perf_counter()
        layout.build_image(columns, header)
        taken["image"].append(time.perf_counter() - start)
        del columns
    shutil.rmtree(run.root)
    pairs = zip(taken["plain"][1:], taken["publish"][1:], strict=True)
    builds = map(sum, zip(taken["columns"][1:], taken["image"][1:], strict=True))
    medians = {f"{name}_ms": 1e3 * statistics.median(v[1:]) for name, v in taken.items()}
    return {
        "bytes": size_bytes,
        "share_of_plain": spread([plain / publish for plain, publish in pairs]),
        **{name: round(value, 2) for name, value in medians.items()},
        "publish_mb_per_s": round(size_bytes / 1e3 / medians["publish_ms"], 1),
        "build_mb_per_s": round(size_bytes / 1e6 / statistics.median(builds), 1),
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    named = {"p10": cuts[0], "median": statistics.median(values), "p90": cuts[-1]}
    return {name: round(1e3 * value, 2) for name, value in named.items()}


def _git_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
