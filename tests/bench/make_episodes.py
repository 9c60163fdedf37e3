"""A run directory full of made-up episodes: `python tests/bench/make_episodes.py DIR`.

By default 1,000,000 episodes of about 200 tokens in 200 shards, one shard and one step per policy
version, published by the writer that runs use. Texts are some 400 characters long. Prints one JSON
line: what was written and how fast.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench_line import print_bench_line  # noqa: E402
from sample_episodes import make_header, make_run  # noqa: E402
from slurm_grpo.run.directory import RunDir  # noqa: E402
from slurm_grpo.run.metrics import MetricsWriter  # noqa: E402
from slurm_grpo.staging.layout import MAX_SAMPLES, TEXT, Array, Columns  # noqa: E402
from slurm_grpo.staging.manifest import Manifest, publish_manifest  # noqa: E402
from slurm_grpo.staging.shards import publish_columns  # noqa: E402

GROUP_SIZE = 8
N_PROMPT_TOKENS = 90
WORDS = np.array(["so ", "the ", "sum ", "of ", "12 ", "and ", "7 ", "is ", "19", ".\n"])
PARTS = ("correct", "format")


def make_columns(rng: np.random.Generator, shard: int, n_groups: int, n_tokens: int) -> Columns:
    """One shard of version `shard`: lengths spread around `n_tokens`, one answer in ten repeated,
    one group in eight without spread."""
    n = n_groups * GROUP_SIZE
    group_id = shard * n_groups + np.arange(n_groups)
    lengths = rng.integers(n_tokens // 2, n_tokens * 3 // 2 + 1, n)
    texts = _sentences(rng, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    reward = (rng.random(n) < 0.3 + 0.4 * shard / 200).astype("f4")
    reward[: n // 8] = 1.0
    versions = np.full(n, shard, "i8")
    sampled_at = 1.7e9 + shard * 60 + np.sort(rng.random(n)) * 30
    data = {
        "groups/group_id": group_id,
        "groups/prompt_offsets": np.arange(n_groups + 1) * N_PROMPT_TOKENS,
        "groups/prompt_tokens": rng.integers(0, 49_152, n_groups * N_PROMPT_TOKENS, "i4"),
        "groups/episode_offsets": np.arange(n_groups + 1) * GROUP_SIZE,
        "groups/task": _texts(["addition" if p % 2 else "sum_digits" for p in range(n_groups)]),
        "groups/prompt_text": _texts([f"What is {g} + {g % 97}?" for g in group_id]),
        "groups/target_json": np.array([str(g + g % 97) for g in group_id], TEXT),
        "episodes/episode_id": np.repeat(group_id * MAX_SAMPLES, GROUP_SIZE)
        + np.tile(np.arange(GROUP_SIZE), n_groups),
        "episodes/sample_seed": rng.integers(0, 2**62, n),
        "episodes/token_offsets": offsets,
        "episodes/reward": reward,
        "episodes/advantage": (reward - 0.5) * 2,
        "episodes/reward_parts": np.stack([reward, rng.random(n, "f4")], axis=1),
        "episodes/finish_reason": (lengths == lengths.max()).astype("u1"),
        "episodes/policy_version_min": versions,
        "episodes/policy_version_max": versions,
        "episodes/t_submit": sampled_at,
        "episodes/t_first_token": sampled_at + 0.1,
        "episodes/t_finish": sampled_at + 0.1 + lengths * 0.01,
        "episodes/completion_text": _texts(texts),
        "episodes/info_json": np.full(n, "{}", TEXT),
        "tokens/token_id": rng.integers(0, 49_152, offsets[-1], "i4"),
        "tokens/logprob": -rng.random(offsets[-1], "f4"),
        "tokens/policy_version": np.full(offsets[-1], shard, "i4"),
        "tokens/loss_mask": np.ones(offsets[-1], "u1"),
    }
    return Columns(data, PARTS)


def write_run(root: Path, *, n_episodes: int, n_shards: int, n_tokens: int) -> RunDir:
    """The whole run: shards, a manifest per shard, the metrics that go with them."""
    run = make_run(root)
    run.attempt(0).root.mkdir()
    run.attempt(0).resumed_from.write_text("0")
    rng = np.random.default_rng(0)
    metrics = MetricsWriter(run.metrics_file("trainer"), attempt=0)
    for shard in range(n_shards):
        columns = make_columns(rng, shard, n_episodes // n_shards // GROUP_SIZE, n_tokens)
        ref = publish_columns(run, columns, make_header(sequence=shard))
        chosen = tuple((g.group_id, ref.path) for g in ref.groups)
        publish_manifest(run, Manifest(step=shard + 1, attempt=0, groups=chosen, dropped=()))
        metrics.log(shard + 1, {"trainer/mismatch_k3_nats": 1e-4, "trainer/mismatch_max_nats": 0.1})
    metrics.close()
    return run


def _sentences(rng: np.random.Generator, lengths: Array) -> list[str]:
    """About two characters a token; every tenth text is that of its neighbour."""
    words = WORDS[rng.integers(0, len(WORDS), int(lengths.max()))]
    text = "".join(words.tolist())
    starts = rng.integers(0, len(text) // 4, len(lengths))
    starts[1::10] = starts[::10][: len(starts[1::10])]
    lengths[1::10] = lengths[::10][: len(lengths[1::10])]
    return [text[s : s + 2 * n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _texts(values: list[str]) -> Array:
    return np.array([json.dumps(v) for v in values], TEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="mean length of a completion")
    given = parser.parse_args()
    start = time.perf_counter()
    run = write_run(
        given.dir, n_episodes=given.episodes, n_shards=given.shards, n_tokens=given.tokens
    )
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in run.episodes.glob("*.h5"))
    values = {"n_episodes": given.episodes, "n_shards": given.shards, "bytes": size}
    print_bench_line("make_episodes", values | {"s": round(seconds, 1)})


if __name__ == "__main__":
    main()
