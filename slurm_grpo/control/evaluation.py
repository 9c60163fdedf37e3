"""Held-out evaluations, cut into chunks that engines with the right version work through. Pure.

A chunk belongs to the engine it was given to until its result is in or the engine dies. The trainer
waits for an evaluation before it opens the next door, since no engine holds the old version
afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_grpo.config.schema import Config

CHUNK = 32
SUMS = ("n", "n_judged", "n_correct", "reward_sum", "n_tokens", "n_truncated")


@dataclass(slots=True)
class _Evaluation:
    version: int
    n: int
    waiting: list[tuple[int, int]]  # [start, stop) of prompts nobody works on
    owners: dict[tuple[int, int], int] = field(default_factory=dict)  # chunk -> engine
    results: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.waiting and not self.owners


class Evaluations:
    """All evaluations of an attempt, by id."""

    def __init__(self, cfg: Config) -> None:
        self._n_engines = cfg.generator.n_engines
        self._max_chunks = max(1, -(-cfg.generator.engine.max_num_seqs // CHUNK))
        self._all: dict[str, _Evaluation] = {}

    @property
    def is_pending(self) -> bool:
        return any(not e.is_complete for e in self._all.values())

    def unfinished_before(self, version: int) -> list[str]:
        """Evaluations that no engine could finish any more once `version` is installed."""
        return [i for i, e in self._all.items() if not e.is_complete and e.version < version]

    def request(self, eval_id: str, version: int, n: int) -> None:
        """Queue `n` prompts for engines that hold `version`; a known id is ignored."""
        size = max(1, min(CHUNK, -(-n // self._n_engines)))
        chunks = [(start, min(start + size, n)) for start in range(0, n, size)]
        self._all.setdefault(eval_id, _Evaluation(version, n, chunks))

    def assign(self, versions: Mapping[int, int]) -> set[int]:
        """Hand waiting chunks to engines (id -> installed version); returns those that got some."""
        given: set[int] = set()
        for evaluation in self._all.values():
            engines = [e for e, version in versions.items() if version == evaluation.version]
            while evaluation.waiting and engines:
                load = {e: len(self.chunks(e)) for e in engines}
                engine = min(engines, key=lambda e: (load[e], e))
                if load[engine] >= self._max_chunks:
                    break
                evaluation.owners[evaluation.waiting.pop(0)] = engine
                given.add(engine)
        return given

    def result(
        self, engine: int, eval_id: str, start: int, stop: int, sums: dict[str, Any]
    ) -> None:
        """Count a chunk once, from the engine that owns it."""
        evaluation = self._all.get(eval_id)
        if evaluation is not None and evaluation.owners.get((start, stop)) == engine:
            del evaluation.owners[start, stop]
            evaluation.results[start, stop] = {key: sums[key] for key in SUMS}

    def release(self, engine: int) -> None:
        """A dead engine's chunks wait for another."""
        for evaluation in self._all.values():
            mine = [chunk for chunk, owner in evaluation.owners.items() if owner == engine]
            for chunk in mine:
                del evaluation.owners[chunk]
            evaluation.waiting = sorted(evaluation.waiting + mine)

    def chunks(self, engine: int) -> list[dict[str, Any]]:
        """What the engine is to evaluate."""
        return [
            {"eval_id": eval_id, "start": start, "stop": stop}
            for eval_id, evaluation in self._all.items()
            for (start, stop), owner in sorted(evaluation.owners.items())
            if owner == engine
        ]

    def complete(self) -> dict[str, dict[str, Any]]:
        """Sums of every finished evaluation, with the version they were measured on."""
        return {
            eval_id: {
                "version": evaluation.version,
                **{key: sum(r[key] for r in evaluation.results.values()) for key in SUMS},
            }
            for eval_id, evaluation in self._all.items()
            if evaluation.is_complete
        }
