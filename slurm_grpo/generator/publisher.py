"""The generator's second thread: score, compute advantages, publish shards, announce them;
evaluate.

The engine thread hands finished groups over and goes on decoding, so that a slow reward or disk
never stops it. In strict mode a share (everything one engine owns of a step) becomes one shard;
otherwise a shard closes after `generator.publish_groups` groups, `publish_after_s` seconds, or when
the engine has nothing left to do.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from slurm_grpo.algorithms.advantage import group_advantages
from slurm_grpo.config.schema import Config
from slurm_grpo.control.client import ControlClient
from slurm_grpo.generator.engine import FinishedGroup
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.staging.layout import ShardHeader
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.tasks.scorer import Scorer
from slurm_grpo.types import Episode, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEval:
    """A finished chunk of an evaluation: held-out prompts `start` to `stop`, one greedy completion
    each."""

    eval_id: str
    start: int
    stop: int
    rows: tuple[FinishedGroup, ...]


class _Flush:
    """Tells the thread that the engine is idle: publish what is there."""


class Publisher:
    """Owns the scoring child process, the shard sequence and the thread. Use from one engine
    thread; then `close`."""

    def __init__(
        self,
        cfg: Config,
        run: RunDir,
        client: ControlClient,
        header: ShardHeader,
        metrics: MetricsWriter,
    ) -> None:
        self._cfg = cfg
        self._run = run
        self._client = client
        self._header = header
        self._metrics = metrics
        self._scorer = Scorer(cfg.task.scorer)
        self._queue: queue.Queue[FinishedGroup | FinishedEval | _Flush | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._pending: list[Group] = []
        self._pending_since = 0.0
        self._score_s = 0.0
        self._thread = threading.Thread(target=self._run_thread, name="publisher", daemon=True)
        self._thread.start()

    def put(self, item: FinishedGroup | FinishedEval) -> None:
        """Hand over; raises in the engine thread what the publisher thread raised."""
        self.check()
        self._queue.put(item)

    def flush(self) -> None:
        """Publish what has been handed over; returns at once."""
        self._queue.put(_Flush())

    def check(self) -> None:
        """Raise what the publisher thread raised, if anything."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread and the scoring process. Unpublished groups are dropped: nobody was
        promised them."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)
        self._scorer.close()

    def _run_thread(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=self._seconds_to_publication())
                except queue.Empty:
                    self._publish()
                    continue
                if item is None:
                    return
                self._take(item)
        except BaseException as failure:  # noqa: BLE001 - raised again in the engine thread
            self._failure = failure

    def _seconds_to_publication(self) -> float | None:
        if not self._pending or self._cfg.strict_mode:
            return None
        return max(
            0.0, self._pending_since + self._cfg.generator.publish_after_s - time.monotonic()
        )

    def _take(self, item: FinishedGroup | FinishedEval | _Flush) -> None:
        if isinstance(item, FinishedEval):
            self._evaluate(item)
        elif isinstance(item, FinishedGroup):
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending.append(self._score(item))
            full = len(self._pending) >= self._cfg.generator.publish_groups
            if full and not self._cfg.strict_mode:
                self._publish()
        else:
            self._publish()

    def _score(self, item: FinishedGroup) -> Group:
        """Episodes with rewards and advantages; an episode whose scoring failed has neither."""
        started = time.monotonic()
        results = self._scorer.score([(c.text, item.prompt.target) for c in item.completions])
        good = [i for i, result in enumerate(results) if result.error is None]
        rewards = np.array([results[i].reward for i in good], dtype=np.float32)
        advantages = dict(
            zip(good, group_advantages(rewards, self._cfg.algorithm.advantage), strict=True)
        )
        group = [
            Episode(
                group_id=item.group_id,
                sample_index=i,
                sample_seed=item.sample_seed + i,
                prompt=item.prompt,
                completion=completion,
                reward=result.reward,
                reward_parts=result.parts,
                advantage=float(advantages[i]) if i in advantages else None,
                error=result.error,
            )
            for i, (completion, result) in enumerate(zip(item.completions, results, strict=True))
        ]
        self._score_s += time.monotonic() - started
        return group

    def _publish(self) -> None:
        if not self._pending:
            return
        started = time.monotonic()
        groups = sorted(self._pending, key=lambda group: group[0].group_id)
        ref = publish_groups(self._run, groups, self._header)
        self._client.send("announce", shard=ref.to_json())
        episodes = [episode for group in groups for episode in group]
        n_tokens = sum(len(e.completion.token_ids) for e in episodes)
        first = min(e.completion.t_submit for e in episodes)
        last = max(e.completion.t_finish for e in episodes)
        self._metrics.log(
            int(max(e.completion.policy_versions.max(initial=0) for e in episodes)),
            {
                "generator/n_groups": len(groups),
                "generator/n_episodes": len(episodes),
                "generator/n_tokens": n_tokens,
                "generator/generate_s": last - first,
                "generator/tokens_per_s": n_tokens / max(last - first, 1e-9),
                "generator/score_s": self._score_s,
                "generator/publish_s": time.monotonic() - started,
                "generator/shard_bytes": ref.size_bytes,
                "generator/n_scorer_errors": sum(e.error is not None for e in episodes),
            },
        )
        self._pending = []
        self._score_s = 0.0
        self._header = replace(self._header, sequence=self._header.sequence + 1)

    def _evaluate(self, item: FinishedEval) -> None:
        completions = [row.completions[0] for row in item.rows]
        targets = [row.prompt.target for row in item.rows]
        results = self._scorer.score(
            [(c.text, t) for c, t in zip(completions, targets, strict=True)]
        )
        self._client.send(
            "eval_result",
            eval_id=item.eval_id,
            start=item.start,
            stop=item.stop,
            n=len(results),
            # A scorer may know no right answers, only rewards.
            n_judged=sum("correct" in result.parts for result in results),
            n_correct=sum(result.parts.get("correct", 0.0) == 1.0 for result in results),
            reward_sum=float(sum(result.reward for result in results)),
            n_tokens=sum(len(c.token_ids) for c in completions),
            n_truncated=sum(c.finish_reason == "length" for c in completions),
        )


def sampling_params_json(cfg: Config) -> str:
    """What is recorded in a shard about how it was sampled."""
    return json.dumps(
        {**asdict(cfg.generator.sampling), "n": cfg.algorithm.group_size}, sort_keys=True
    )
