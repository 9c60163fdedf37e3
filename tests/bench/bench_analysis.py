"""Ask questions of a large run: `python tests/bench/bench_analysis.py RUN`, by make_episodes.py.

Prints one JSON line: seconds of the `summary` command and its peak memory, of one column of all
episodes, of 1,000 random episodes with text and tokens, and the rate of an export with tokens. Each
but the export is repeated; files are in the page cache from the second time on. What is exported
goes to a temporary file in RUN's parent.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench_line import print_bench_line, spread  # noqa: E402
from slurm_grpo.analysis import open_run  # noqa: E402
from slurm_grpo.analysis.export import export_episodes  # noqa: E402

N_REPEATS = 5
N_RANDOM = 1000
TOKEN_BYTES = 13
"""Of a token in a shard: id, log-probability, version, mask."""
SUMMARY = "import sys; from slurm_grpo.commands.main import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    path = parser.parse_args().run
    seconds, peaks = zip(*(summary_command(path) for _ in range(N_REPEATS)), strict=True)
    opening = [timed(lambda: open_run(path)) for _ in range(N_REPEATS)]
    run = open_run(path)
    column = [timed(lambda: run.episodes(["reward"])) for _ in range(N_REPEATS)]
    episodes = run.episodes(["episode_id", "n_tokens"])
    rng = np.random.default_rng(0)

    def random_access() -> None:
        ids = rng.choice(episodes["episode_id"], N_RANDOM, replace=False).tolist()
        texts = run.episodes(["reward", "completion_text"], episode_ids=ids)
        assert len(texts) == len(ids)
        assert run.tokens(ids)["episode_id"].nunique() == len(ids)

    access = [timed(random_access) for _ in range(N_REPEATS)]
    token_mb = int(episodes["n_tokens"].sum()) * TOKEN_BYTES / 1e6
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / "out.parquet"
        export_s = timed(lambda: export_episodes(run, out, tokens=True))
        out_mb = out.stat().st_size / 1e6
    values = {
        "n_episodes": len(episodes),
        "n_shards": len(run.index.shards),
        "token_mb": round(token_mb),
        "summary_s": spread(seconds),
        "summary_peak_mib": round(max(peaks)),
        "open_s": spread(opening),
        "one_column_s": spread(column),
        "random_1000_s": spread(access),
        "export_s": round(export_s, 2),
        "export_token_mb_per_s": round(token_mb / export_s, 1),
        "export_mb": round(out_mb),
    }
    print_bench_line("analysis", values)


def summary_command(path: Path) -> tuple[float, float]:
    """Seconds and peak MiB of `slurm-grpo episodes summary`, interpreter and imports included."""
    command = [sys.executable, "-c", SUMMARY, "episodes", "summary", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
