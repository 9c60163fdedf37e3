"""The trainer role: one process per rank. Pick groups, read them, learn, send the weights, save.

What each line of the loop waits for, and who unblocks it: `_pick` waits for announcements
(engines), `policy.send` for engines at the door and their digests (engines), `_evaluate` for
results (engines). Rank 0 does all of these and shares the outcome; the other ranks wait for rank 0.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch

from slurm_grpo.config.schema import Config
from slurm_grpo.control.role_process import RoleContext, run_role
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.checkpoints import latest_complete
from slurm_grpo.run.metrics import MetricsWriter, WandbLogger
from slurm_grpo.staging.manifest import load_state
from slurm_grpo.staging.retention import Retention
from slurm_grpo.staging.shards import GroupRef, ShardRef, read_groups
from slurm_grpo.tasks.registry import build_prompt_source
from slurm_grpo.trainer.batching import assign_to_ranks
from slurm_grpo.trainer.checkpoint import export_hf, load_checkpoint, prune, save_checkpoint
from slurm_grpo.trainer.crew import Crew
from slurm_grpo.trainer.learner import Learner
from slurm_grpo.trainer.picker import Picker, StepPlan, StepSource
from slurm_grpo.trainer.policy_sync import PolicySync
from slurm_grpo.trainer.step_metrics import combine, condense
from slurm_grpo.types import Group

log = logging.getLogger(__name__)

POLL_S = 5.0
"""How often rank 0 gives the waiting ranks a sign of life, and looks for engines without weights.
"""


class TrainerLoop:
    """One rank's state. `run` is the table of contents."""

    def __init__(self, context: RoleContext) -> None:
        cfg = context.config
        self._context = context
        self._cfg = cfg
        self._client = context.client
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        self._progress("loading the model")
        self._crew = Crew(context.client, device, timeout_s=_group_timeout_s(cfg))
        self._learner = Learner(cfg, device)
        self._policy = PolicySync(cfg, context.client, self._crew, self._learner)
        self._n_held_out = 0
        if cfg.evaluation.n_prompts:
            source = build_prompt_source(cfg.task, cfg.run.seed)
            self._n_held_out = len(source.eval_prompts(cfg.evaluation.n_prompts))
        self._start = self._crew.share(lambda: latest_complete(context.run) or 0)
        if self._start:
            load_checkpoint(context.run, self._start, self._learner)
        self._saved = self._start
        self._metrics: MetricsWriter | None = None
        self._wandb: WandbLogger | None = None
        self._picker: StepSource | None = None
        self._retention: Retention | None = None
        if self._crew.leads:
            self._begin()

    def _begin(self) -> None:
        """Rank 0: open the attempt's books and tell the scheduler where the run stands."""
        context, cfg = self._context, self._cfg
        write_durably(context.attempt_dir.resumed_from, f"{self._start}\n".encode())
        self._picker = self._make_picker()
        self._retention = Retention(cfg, context.run, context.attempt)
        self._metrics = MetricsWriter(context.run.metrics_file("trainer"), attempt=context.attempt)
        if cfg.wandb.enabled:
            self._wandb = WandbLogger(cfg, context.run, context.attempt)

    def _make_picker(self) -> StepSource:
        """What plans the steps; tells the scheduler which groups are done and which are there."""
        context, cfg = self._context, self._cfg
        state = load_state(
            context.run,
            self._start,
            strict=cfg.strict_mode,
            groups_per_step=cfg.algorithm.groups_per_step,
            max_staleness=cfg.algorithm.max_staleness,
            oversample=cfg.algorithm.oversample,
        )
        picker = Picker(cfg, context.run, context.attempt, context.client, state)
        self._client.send(
            "begin",
            next_group=state.next_group,
            n_dropped=state.n_dropped,
            consumed=sorted(g for g in state.consumed | state.dropped if g >= state.next_group),
            available=[ref.to_json() for ref in state.available],
            spare=picker.first_spare(self._start, state.available),
        )
        return picker

    def run(self) -> None:
        """Until the last step, a boundary stop, or an error."""
        try:
            self._train()
        finally:
            if self._wandb is not None:
                self._wandb.close()  # the process ends without it, and rows would be lost

    def _train(self) -> None:
        self._progress("first weights")
        self._send(self._start)
        self._evaluate(self._start)
        for step in range(self._start + 1, self._cfg.run.steps + 1):
            started = time.monotonic()
            plan = self._pick(step)
            if plan is None:
                self._save(step - 1)
                self._finish("stopped")
                return
            waited = time.monotonic() - started
            groups = self._read(plan.groups)
            read = time.monotonic() - started - waited
            stats = self._learner.train_step(groups)
            stats |= self._send(step)
            stats |= {
                "trainer/wait_for_groups_s": waited,
                "trainer/read_s": read,
                "trainer/step_s": time.monotonic() - started,
            }
            self._log(step, plan, groups, stats)
            self._after_step(step)
        self._end()

    def _end(self) -> None:
        steps = self._cfg.run.steps
        if self._crew.leads:
            self._policy.wait_installed(steps)
            self._policy.check_probe()
        self._save(steps)
        if self._cfg.trainer.checkpoint.export_hf:
            self._progress("exporting")
            export_hf(self._context.run, steps, self._learner)
        self._finish("done")

    def _pick(self, step: int) -> StepPlan | None:
        """The step's groups on every rank; None when the run is to stop at this boundary."""
        while True:
            what, plan = self._crew.share(lambda: self._poll(step))
            if what == "resync":
                self._policy.send(step - 1)
            elif what == "plan":
                return plan
            elif what == "stop":
                return None

    def _poll(self, step: int) -> tuple[str, StepPlan | None]:
        def outcome(view: dict[str, Any]) -> tuple[str, StepPlan | None] | None:
            assert self._picker is not None
            if view["boundary_stop"]:
                return "stop", None
            if view["unsynced"]:
                return "resync", None
            plan = self._picker.poll(step)
            return None if plan is None else ("plan", plan)

        return self._client.poll_for(outcome, POLL_S) or ("idle", None)

    def _read(self, of_all_ranks: Sequence[tuple[GroupRef, ShardRef]]) -> list[Group]:
        """This rank's slice of a step's groups, in the plan's order."""
        rows = assign_to_ranks([group.n_tokens for group, _ in of_all_ranks], self._crew.world_size)
        mine = [of_all_ranks[i] for i in rows[self._crew.rank]]
        found: dict[int, Group] = {}
        for path, ref in {ref.path: ref for _, ref in mine}.items():
            ids = [group.group_id for group, r in mine if r.path == path]
            groups = read_groups(self._context.run, ref, ids)
            found |= {group[0].group_id: group for group in groups}
        return [found[group.group_id] for group, _ in mine]

    def _log(self, step: int, plan: StepPlan, groups: list[Group], stats: dict[str, float]) -> None:
        trained = condense(groups, step)
        aside = condense(self._read(plan.set_aside), step)
        gathered = self._crew.gather((trained, aside))
        if not self._crew.leads:
            return
        row = combine([ranks[0] for ranks in gathered], [ranks[1] for ranks in gathered]) | stats
        row["groups/dropped_stale"] = float(plan.n_dropped_stale)
        row["groups/dropped_no_signal"] = float(plan.n_dropped_no_signal)
        row["groups/surplus"] = float(plan.n_surplus)
        row["groups/n_rounds"] = float(plan.n_rounds)
        n_tokens = sum(group.n_tokens for group, _ in plan.groups)
        row["trainer/memory_bytes"] = peak_memory_bytes(self._learner.device)
        row["trainer/tokens_per_s"] = n_tokens / row["trainer/forward_backward_s"]
        pauses = [
            engine["stats"]["pause_s"]
            for engine in self._client.view["engines"].values()
            if engine["stats"]
        ]
        if pauses:
            row["generator/pause_s"] = max(pauses)
        self._write(step, row)
        self._progress("training", step=step, **row)

    def _after_step(self, step: int) -> None:
        every = self._cfg.trainer.checkpoint.every_steps
        if every and step % every == 0 and step < self._cfg.run.steps:
            self._save(step)
        self._evaluate(step)

    def _save(self, step: int) -> None:
        if step <= self._saved:
            return
        self._progress("saving a checkpoint")
        save_checkpoint(self._context.run, step, self._learner)
        self._saved = step
        if self._retention is not None:
            prune(self._context.run, self._cfg.trainer.checkpoint.keep)
            self._retention.apply(step)

    def _evaluation_due(self, step: int) -> bool:
        """Before the first step, after the last, and as often as `evaluation.every_steps` says."""
        every = self._cfg.evaluation.every_steps
        at_an_end = step in (0, self._cfg.run.steps)
        return bool(self._n_held_out) and (at_an_end or bool(every and step % every == 0))

    def _send(self, version: int) -> dict[str, float]:
        """Hand the weights over; an evaluation is asked for first, so engines begin with it."""
        if self._evaluation_due(version) and self._crew.leads:
            self._client.send(
                "evaluate", eval_id=f"step-{version}", version=version, n=self._n_held_out
            )
        return self._policy.send(version)

    def _evaluate(self, step: int) -> None:
        """Wait for the greedy evaluation of the version that the engines hold now, and log it."""
        if not self._evaluation_due(step):
            return
        self._progress("evaluating")
        deadline = time.monotonic() + self._cfg.trainer.wait_for_groups_s
        while True:
            what, result = self._crew.share(lambda: self._poll_evaluation(step, deadline))
            if what == "resync":
                self._policy.send(step)
            elif what == "result":
                break
        n = result["n"]
        row = {
            "eval/held_out/reward": result["reward_sum"] / n,
            "eval/held_out/length_mean": result["n_tokens"] / n,
            "eval/held_out/truncation_rate": result["n_truncated"] / n,
            "eval/held_out/n": n,
        }
        if result["n_judged"]:
            row["eval/held_out/accuracy"] = result["n_correct"] / n
        self._write(step, row)
        self._progress("training", **row)

    def _poll_evaluation(self, step: int, deadline: float) -> tuple[str, Any]:
        def outcome(view: dict[str, Any]) -> tuple[str, Any] | None:
            if result := view["evals"].get(f"step-{step}"):
                return "result", result
            return ("resync", None) if view["unsynced"] else None

        if time.monotonic() > deadline:
            return self._client.wait_for(outcome, 0.0, f"the evaluation of version {step}")
        return self._client.poll_for(outcome, POLL_S) or ("idle", None)

    def _write(self, step: int, row: dict[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.log(step, row)
        if self._wandb is not None:
            self._wandb.log(step, row)

    def _finish(self, status: str) -> None:
        if self._crew.leads:
            self._client.send("finish", status=status)
            # Before the other ranks may leave: one seen gone while the run is on has failed it.
            self._client.flush(self._cfg.cluster.heartbeat_timeout_s)
        self._crew.share(lambda: None)
        self._crew.close()

    def _progress(self, phase: str, **values: float) -> None:
        if self._context.index == 0:
            self._client.send("progress", phase=phase, **values)


def _group_timeout_s(cfg: Config) -> float:
    """The longest that ranks wait for rank 0: engines coming to the door, perhaps restarted, or a
    transfer, which forms a group, sends and waits for digests."""
    sync = cfg.weight_sync
    at_door_s = cfg.cluster.start_timeout_s + sync.door_timeout_s
    return max(at_door_s, 3 * sync.transfer_timeout_s) + 60.0


def peak_memory_bytes(device: torch.device) -> float:
    """The most this process has held: GPU memory on a GPU, else resident memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    """Entry point of `python -m slurm_grpo.trainer.role`."""
    run_role(lambda context: TrainerLoop(context).run())


if __name__ == "__main__":
    main()
