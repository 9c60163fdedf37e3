"""The generator role: one process per engine. Take groups, generate, hand over to the publisher, swap weights.

Everything the loop should be doing stands in its view from the control plane: group ids to generate, evaluation
chunks, a weight transfer to join, a stop. It waits for a change of that view when the engine has nothing to step;
the scheduler unblocks it. Between two engine steps is the only place where weights change.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

from slurm_grpo.errors import ConfigError, DeadlineExceeded, SyncError
from slurm_grpo.generator.engine import Engine
from slurm_grpo.generator.publisher import FinishedEval, FinishedPrompt, Publisher, sampling_params_json
from slurm_grpo.metrics import MetricsWriter
from slurm_grpo.role_process import RoleContext, run_role
from slurm_grpo.staging.shards import ShardHeader
from slurm_grpo.tasks.base import build_prompt_source
from slurm_grpo.tasks.render import render_prompt
from slurm_grpo.types import Completion, Prompt
from slurm_grpo.versions import code_version

log = logging.getLogger(__name__)

Key = tuple[Any, ...]
"""What a request is for: ("group", group id) or ("eval", eval id, start, index)."""


class GeneratorLoop:
    """State of one engine process between two steps."""

    def __init__(self, context: RoleContext) -> None:
        cfg = context.config
        self._cfg = cfg
        self._client = context.client
        self._source = build_prompt_source(cfg.task, cfg.run.seed)
        self._engine = Engine(cfg)
        self._metrics = MetricsWriter(
            context.run.metrics_file(f"generator-{context.index}"), attempt=context.attempt
        )
        self._publisher = Publisher(
            cfg, context.run, context.client, self._shard_header(context), self._metrics
        )
        self._admitted: set[int] = set()
        """Groups taken over; kept until they vanish from the view, which is when their shard was announced."""
        self._seeds: dict[int, int] = {}
        self._evals: dict[tuple[str, int], dict[int, tuple[Prompt, Completion | None]]] = {}
        self._version: int | None = None

    def run(self) -> None:
        """Until the control plane says stop."""
        self._client.send("ready")
        while True:
            self._publisher.check()
            view = self._client.view
            if view.get("stop"):
                break
            if view.get("door"):
                self._join_transfer(view["door"])
                continue
            self._admit(view)
            if self._engine.n_unfinished:
                self._step()
            else:
                self._client.wait_for(self._has_work, timeout_s=1.0, what="work", missing_ok=True)
        self.close()

    def close(self) -> None:
        self._publisher.close()
        self._engine.shutdown()

    def _has_work(self, view: dict[str, Any]) -> bool | None:
        new_groups = set(view.get("groups", ())) - self._admitted
        new_evals = {(e["eval_id"], e["start"]) for e in view.get("evals", ())} - self._evals.keys()
        return bool(view.get("door") or new_groups or new_evals) or None

    def _admit(self, view: dict[str, Any]) -> None:
        wanted = set(view.get("groups", ()))
        self._admitted &= wanted
        for group_id in sorted(wanted - self._admitted):
            spec = self._source.train_prompt(group_id)
            prompt = render_prompt(spec, self._engine.tokenizer, self._cfg.task.chat_template)
            self._check_length(prompt, f"group {group_id}")
            self._seeds[group_id] = sample_seed(
                self._cfg.run.seed, group_id, self._cfg.algorithm.group_size
            )
            self._engine.admit(
                ("group", group_id), prompt, self._seeds[group_id], self._cfg.algorithm.group_size
            )
            self._admitted.add(group_id)
        chunks = {(e["eval_id"], e["start"]): e for e in view.get("evals", ())}
        self._evals = {key: state for key, state in self._evals.items() if key in chunks}
        for key in sorted(chunks.keys() - self._evals.keys()):
            self._admit_eval(chunks[key])

    def _admit_eval(self, chunk: dict[str, Any]) -> None:
        specs = self._source.eval_prompts(self._cfg.evaluation.n_prompts)[chunk["start"] : chunk["stop"]]
        state: dict[int, tuple[Prompt, Completion | None]] = {}
        for i, spec in enumerate(specs):
            prompt = render_prompt(spec, self._engine.tokenizer, self._cfg.task.chat_template)
            self._check_length(prompt, f"held-out prompt {chunk['start'] + i}")
            self._engine.admit(
                ("eval", chunk["eval_id"], chunk["start"], i), prompt, 0, 1, greedy=True
            )
            state[i] = (prompt, None)
        self._evals[chunk["eval_id"], chunk["start"]] = state

    def _check_length(self, prompt: Prompt, what: str) -> None:
        limit = self._cfg.generator.engine.max_model_len - self._cfg.generator.sampling.max_new_tokens
        if len(prompt.token_ids) > limit:
            raise ConfigError(
                f"{what}: the prompt has {len(prompt.token_ids)} tokens, but at most {limit} fit beside "
                f"generator.sampling.max_new_tokens {self._cfg.generator.sampling.max_new_tokens} in "
                f"generator.engine.max_model_len {self._cfg.generator.engine.max_model_len}. Shorten it or raise "
                f"max_model_len. It begins: {prompt.text[:80]!r}"
            )

    def _step(self) -> None:
        for finished in self._engine.step():
            if finished.key[0] == "group":
                group_id = finished.key[1]
                self._publisher.put(
                    FinishedPrompt(
                        prompt=finished.prompt,
                        completions=finished.completions,
                        sample_seed=self._seeds.pop(group_id),
                        group_id=group_id,
                    )
                )
            else:
                self._finish_eval(finished.key, finished.completions[0])
        if not self._engine.n_unfinished:
            self._publisher.flush()

    def _finish_eval(self, key: Key, completion: Completion) -> None:
        _, eval_id, start, index = key
        state = self._evals.get((eval_id, start))
        if state is None:
            return
        state[index] = (state[index][0], completion)
        completions = [c for _, c in state.values() if c is not None]
        if len(completions) < len(state):
            return
        if not self._engine.n_unfinished:
            self._engine.reset_cache()  # the shared shots must not be warm in one run and cold in its resumption
        self._publisher.put(
            FinishedEval(
                eval_id=eval_id,
                start=start,
                stop=start + len(state),
                prompts=[prompt for prompt, _ in state.values()],
                completions=completions,
            )
        )

    def _join_transfer(self, door: dict[str, Any]) -> None:
        """Come to the door, receive, wait for the commit, install. A new door replaces this one at any point."""
        key = (door["epoch"], door["version"])
        arrived = time.monotonic()
        self._client.send("at_door", epoch=door["epoch"], version=door["version"])
        if not self._await(key, lambda view: view["door"]["go"], "the other engines at the door"):
            return
        door = self._client.view["door"] or door
        try:
            received = self._engine.receive(
                door["store"], door["epoch"], door["first_rank"], door["world_size"], door["version"]
            )
        except (SyncError, DeadlineExceeded) as error:
            log.warning("weights of version %d did not arrive: %s", door["version"], error)
            self._client.send("receive_failed", epoch=key[0], version=key[1], error=str(error))
            self._await(key, lambda view: None, "another attempt at the transfer")
            return
        self._client.send("received", epoch=key[0], version=key[1], digest=received.digest)
        committed = self._await(
            key, lambda view: view.get("committed") == key[1], "the trainer's commit", or_no_door=True
        )
        if not committed:
            return
        installed = self._engine.install(door["version"])
        self._version = door["version"]
        pause_s = time.monotonic() - arrived
        self._client.send("installed", version=door["version"], pause_s=pause_s, load_s=installed.load_s)
        self._metrics.log(
            door["version"],
            {
                "generator/pause_s": pause_s,
                "generator/receive_s": received.receive_s,
                "generator/load_s": installed.load_s,
                "generator/received_bytes": received.n_bytes,
            },
        )

    def _await(self, key: tuple[int, int], ready: Any, what: str, *, or_no_door: bool = False) -> bool:
        """Wait until `ready(view)`; False when another door stands there instead, or none."""

        def outcome(view: dict[str, Any]) -> str | None:
            if or_no_door and ready(view):
                return "ready"
            door = view.get("door")
            if not door or (door["epoch"], door["version"]) != key:
                return "replaced"
            return "ready" if ready(view) else None

        sync = self._cfg.weight_sync
        timeout_s = sync.door_timeout_s + sync.transfer_timeout_s
        return bool(self._client.wait_for(outcome, timeout_s=timeout_s, what=what) == "ready")

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
            sampling_params_json=sampling_params_json(self._cfg),
            code_version=code_version(),
        )


def sample_seed(run_seed: int, group_id: int, group_size: int) -> int:
    """Seed of a group's first sample; sample i uses this plus i, so neighbours are `group_size` apart.

    A hash of the run seed picks where a run starts, within the 63 bits that the engine accepts.
    """
    start = int.from_bytes(hashlib.sha256(f"sampling/{run_seed}".encode()).digest()[:6], "big")
    return start + group_id * group_size


def main() -> None:
    """Entry point of `python -m slurm_grpo.generator.role`."""
    run_role(lambda context: GeneratorLoop(context).run())


if __name__ == "__main__":
    main()
