"""The generator role: one process per engine. Take groups, generate, hand over to the publisher,
swap weights.

Everything the loop should be doing stands in its view from the control plane: group ids to
generate, evaluation chunks, a weight transfer to join, a stop. It waits for a change of that view
when the engine has nothing to step; the scheduler unblocks it. Between two engine steps is the only
place where weights change.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from slurm_grpo.control.role_process import RoleContext, run_role
from slurm_grpo.errors import DeadlineExceeded, SyncError
from slurm_grpo.generator.engine import Engine, FinishedGroup
from slurm_grpo.generator.publisher import FinishedEval, Publisher, sampling_params_json
from slurm_grpo.run.metrics import MetricsWriter
from slurm_grpo.run.versions import code_version
from slurm_grpo.staging.layout import ShardHeader
from slurm_grpo.tasks.base import PromptSpec
from slurm_grpo.tasks.registry import build_prompt_source
from slurm_grpo.tasks.render import check_fits, render_prompt
from slurm_grpo.types import Prompt

log = logging.getLogger(__name__)

_EVAL = "eval/"
"""Tag of evaluation requests, followed by the chunk they belong to."""
IDLE_S = 1.0
PROBE_TOKENS = 64
"""Length of the prompt whose log-probabilities show that installed weights work."""


Order = tuple[int, int]
"""A group to generate: its id, and how often its shard was lost before."""


def orders(view: dict[str, Any]) -> set[Order]:
    """What the view asks this engine to generate."""
    return {(g, view["again"].get(str(g), 0)) for g in view["groups"]}


@dataclass(kw_only=True, slots=True)
class _EvalChunk:
    """Held-out prompts up to `stop` that this engine evaluates, and what is finished of them."""

    stop: int
    rows: list[FinishedGroup] = field(default_factory=list)


class GeneratorLoop:
    """State of one engine process between two steps."""

    def __init__(self, context: RoleContext) -> None:
        cfg = context.config
        self._cfg = cfg
        self._client = context.client
        self._source = build_prompt_source(cfg.task, cfg.run.seed)
        self._engine = Engine(cfg, seed=cfg.run.seed)
        self._metrics = MetricsWriter(
            context.run.metrics_file(f"generator-{context.index}"), attempt=context.attempt
        )
        self._publisher = Publisher(
            cfg, context.run, context.client, self._shard_header(context), self._metrics
        )
        self._held_out = self._source.eval_prompts(cfg.evaluation.n_prompts)
        probe = self._render(self._source.train_prompt(0)).token_ids[:PROBE_TOKENS].tolist()
        self._probe = probe if len(probe) > 1 else probe * 2  # the first token has no odds
        self._admitted: set[Order] = set()
        """Groups taken over; kept until they vanish from the view, which is when their shard was
        announced."""
        self._evals: dict[tuple[str, int], _EvalChunk] = {}
        self._version: int | None = None

    def run(self) -> None:
        """Until the control plane says stop, or an error; the engine is shut down either way."""
        try:
            self._loop()
        finally:
            self._publisher.close()
            self._engine.shutdown()

    def _loop(self) -> None:
        self._client.send("ready", probe=self._probe)
        while True:
            self._publisher.check()
            view = self._client.view
            if view["stop"]:
                return
            if view["door"]:
                self._join_transfer(view["door"])
                continue
            self._admit(view)
            if self._engine.n_unfinished:
                self._step()
            else:
                self._client.poll_for(self._has_work, IDLE_S)

    def _has_work(self, view: dict[str, Any]) -> bool | None:
        new_groups = orders(view) - self._admitted
        new_evals = {(e["eval_id"], e["start"]) for e in view["evals"]} - self._evals.keys()
        return bool(view["door"] or new_groups or new_evals) or None

    def _admit(self, view: dict[str, Any]) -> None:
        wanted = orders(view)
        algorithm = self._cfg.algorithm
        if self._cfg.strict_mode and wanted - self._admitted and not self._engine.n_unfinished:
            # What rounds before left in the prefix cache must not differ between a run and its
            # resumption, which may have found them on disk.
            self._engine.reset_cache()
        for group_id, _ in sorted(wanted - self._admitted):
            prompt = self._render(self._source.train_prompt(group_id))
            seed = sample_seed(self._cfg.run.seed, group_id, algorithm.group_size)
            self._engine.admit(group_id, prompt, seed, algorithm.group_size)
        self._admitted = wanted
        chunks = {(e["eval_id"], e["start"]): e["stop"] for e in view["evals"]}
        self._evals = {key: found for key, found in self._evals.items() if key in chunks}
        for eval_id, start in sorted(chunks.keys() - self._evals.keys()):
            specs = self._held_out[start : chunks[eval_id, start]]
            for index, spec in enumerate(specs, start=start):
                tag = f"{_EVAL}{eval_id}/{start}"
                self._engine.admit(index, self._render(spec), 0, 1, greedy=True, tag=tag)
            self._evals[eval_id, start] = _EvalChunk(stop=chunks[eval_id, start])

    def _render(self, spec: PromptSpec) -> Prompt:
        prompt = render_prompt(spec, self._engine.tokenizer, self._cfg.task.chat_template)
        check_fits(
            prompt,
            max_new_tokens=self._cfg.generator.sampling.max_new_tokens,
            max_tokens=min(
                self._cfg.generator.engine.max_model_len, self._cfg.trainer.tokens_per_microbatch
            ),
        )
        return prompt

    def _step(self) -> None:
        for finished in self._engine.step():
            if finished.tag.startswith(_EVAL):
                self._finish_eval(finished)
            else:
                self._publisher.put(finished)
        if not self._engine.n_unfinished:
            self._publisher.flush()

    def _finish_eval(self, finished: FinishedGroup) -> None:
        eval_id, start = finished.tag.removeprefix(_EVAL).rsplit("/", 1)
        chunk = self._evals.get((eval_id, int(start)))
        if chunk is None:
            return  # it was given to another engine
        chunk.rows.append(finished)
        if len(chunk.rows) < chunk.stop - int(start):
            return
        if not self._engine.n_unfinished:
            # What evaluation left in the prefix cache must not differ between a run and its
            # resumption.
            self._engine.reset_cache()
        self._publisher.put(
            FinishedEval(eval_id=eval_id, start=int(start), stop=chunk.stop, rows=tuple(chunk.rows))
        )

    def _join_transfer(self, door: dict[str, Any]) -> None:
        """Come to the door, receive, wait for the commit, install. A new door replaces this one at
        any point."""
        key = (door["epoch"], door["version"])
        arrived = time.monotonic()
        self._client.send("at_door", epoch=door["epoch"], version=door["version"])
        if not self._await(key, lambda view: view["door"]["go"], "the other engines at the door"):
            return
        try:
            received = self._engine.receive(
                door["store"],
                door["epoch"],
                door["first_rank"],
                door["world_size"],
                door["version"],
            )
        except (SyncError, DeadlineExceeded) as error:
            log.warning("weights of version %d did not arrive: %s", door["version"], error)
            self._client.send("receive_failed", epoch=key[0], version=key[1], error=str(error))
            self._await(key, lambda view: None, "another attempt at the transfer")
            return
        self._client.send("received", epoch=key[0], version=key[1], digest=received.digest)
        committed = self._await(
            key, lambda view: view["committed"] == key[1], "the trainer's commit", or_no_door=True
        )
        if not committed:
            return
        load_s = self._engine.install(door["version"])
        probe = self._engine.probe_logprobs(self._probe)
        self._engine.reset_cache()
        self._version = door["version"]
        pause_s = time.monotonic() - arrived
        self._client.send(
            "installed",
            version=door["version"],
            pause_s=pause_s,
            load_s=load_s,
            probe=probe,
        )
        self._metrics.log(
            door["version"],
            {
                "generator/pause_s": pause_s,
                "generator/transfer_s": received.transfer_s,
                "generator/verify_s": received.verify_s,
                "generator/load_s": load_s,
                "generator/received_bytes": received.n_bytes,
            },
        )
        # The probe took a step, in which the last completions may have finished: nothing else would
        # hand those over before new work comes.
        self._step()

    def _await(
        self, key: tuple[int, int], ready: Any, what: str, *, or_no_door: bool = False
    ) -> bool:
        """Wait until `ready(view)`; False when another door stands there instead, or none."""

        def outcome(view: dict[str, Any]) -> str | None:
            if or_no_door and ready(view):
                return "ready"
            door = view["door"]
            if not door or (door["epoch"], door["version"]) != key:
                return "replaced"
            return "ready" if ready(view) else None

        sync = self._cfg.weight_sync
        timeout_s = sync.door_timeout_s + sync.transfer_timeout_s
        return bool(self._client.wait_for(outcome, timeout_s, what) == "ready")

    def _shard_header(self, context: RoleContext) -> ShardHeader:
        tokenizer = self._engine.tokenizer
        vocabulary = sorted(tokenizer.get_vocab().items())
        return ShardHeader(
            run_id=context.run.root.name,
            engine_id=context.index,
            incarnation=context.incarnation,
            attempt=context.attempt,
            sequence=0,
            model_id=self._cfg.model.path,
            tokenizer_sha256=hashlib.sha256(repr(vocabulary).encode()).hexdigest(),
            vocab_size=len(tokenizer),
            logprobs_mode="processed_logprobs",
            advantage_estimator=self._cfg.algorithm.advantage,
            sampling_params_json=sampling_params_json(self._cfg),
            code_version=code_version(),
        )


def sample_seed(run_seed: int, group_id: int, group_size: int) -> int:
    """Seed of a group's first sample; sample i uses this plus i, so neighbours are `group_size`
    apart.

    A hash of the run seed picks where a run starts, within the 63 bits that the engine accepts.
    """
    start = int.from_bytes(hashlib.sha256(f"sampling/{run_seed}".encode()).digest()[:6], "big")
    return start + group_id * group_size


def main() -> None:
    """Entry point of `python -m slurm_grpo.generator.role`."""
    run_role(lambda context: GeneratorLoop(context).run())


if __name__ == "__main__":
    main()
