"""A run without a model: roles that speak the real control protocol, and do as a test tells them.

`python -m fakes supervise RUN_DIR` supervises a run whose roles are this module; the environment
variable FAKE_ROLES (JSON, by peer name) says how a role misbehaves:

- ignore_term: SIGTERM is ignored, and so is the control plane's stop
- die_after: an engine exits by itself after so many groups, with `code` (default 1)
- incarnations: `die_after` holds for incarnations below this (default: all)
- fail_at: a trainer rank raises `error` (a name in `errors`) in this step
- hang_at: a trainer rank waits in this step until it is stopped
- step_s: seconds a trainer's step takes
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from slurm_grpo import errors
from slurm_grpo.config.loading import read_frozen
from slurm_grpo.config.schema import Config
from slurm_grpo.control.role_process import RoleContext, run_role
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.run.metrics import MetricsWriter

STORE = "127.0.0.1:1"


def fake_engine(context: RoleContext, orders: dict[str, Any]) -> None:
    """Announce every assigned group at once; receive weights without receiving anything."""
    client = context.client
    limit = orders.get("die_after")
    if context.incarnation >= orders.get("incarnations", sys.maxsize):
        limit = None
    announced: set[int] = set()
    client.send("ready", probe=[1, 2])
    while True:
        view = client.view
        if view["stop"] and not orders.get("ignore_term"):
            return
        door = view["door"]
        if door:
            join_transfer(context, door)
        for group_id in sorted(set(view["groups"]) - announced):
            if limit is not None and len(announced) >= limit:
                client.flush(timeout_s=5.0)
                os._exit(orders.get("code", 1))
            announced.add(group_id)
            client.send("announce", shard=fake_shard(context, group_id))
        time.sleep(0.05)


def join_transfer(context: RoleContext, door: dict[str, Any]) -> None:
    key = {"epoch": door["epoch"], "version": door["version"]}

    def state(view: dict[str, Any]) -> str | None:
        now = view["door"]
        if now and (now["epoch"], now["version"]) == (key["epoch"], key["version"]):
            return "go" if now["go"] else None
        return "committed" if view["committed"] == key["version"] else "replaced"

    context.client.send("at_door", **key)
    if context.client.wait_for(state, timeout_s=20.0, what="go") != "go":
        return
    context.client.send("received", digest=f"digest {key['version']}", **key)

    def ended(view: dict[str, Any]) -> str | None:
        found = state(view)
        return None if found == "go" else found

    if context.client.wait_for(ended, timeout_s=20.0, what="commit") == "committed":
        context.client.send("installed", version=key["version"], pause_s=0.01)


def fake_shard(context: RoleContext, group_id: int) -> dict[str, Any]:
    return {
        "path": f"episodes/{context.peer}-{context.incarnation}-{group_id}.h5",
        "groups": [{"group_id": group_id, "n_tokens": 10}],
    }


def fake_trainer(context: RoleContext, orders: dict[str, Any]) -> None:
    """Take every step: wait for its groups, consume them, hand the next version over."""
    if context.index > 0:
        follow(context, orders)
        return
    client, cfg = context.client, context.config
    write_durably(context.attempt_dir.resumed_from, b"0\n")
    metrics = MetricsWriter(context.run.metrics_file("trainer"), attempt=context.attempt)
    client.send("trainer_store", address=STORE)
    client.send("progress", phase="first weights")
    client.send("begin", next_group=0, n_dropped=0, consumed=[], available=[], spare=0)
    hand_over(context, 0)
    metrics.log(0, {"eval/held_out/accuracy": 0.25, "eval/held_out/reward": 0.25})
    for step in range(1, cfg.run.steps + 1):
        misbehave(context, orders, step)
        groups = wait_for_groups(context, step)
        if groups is None:
            client.send("finish", status="stopped")
            return
        time.sleep(orders.get("step_s", 0.01))
        client.send("consumed", version=step, group_ids=groups, dropped=[], spare=0)
        hand_over(context, step)
        row = {"trainer/step_s": 0.1, "reward/mean": step / cfg.run.steps, "groups": len(groups)}
        metrics.log(step, row)
        client.send("progress", phase="training", step=step, **row)
    metrics.log(cfg.run.steps, {"eval/held_out/accuracy": 0.75, "eval/held_out/reward": 0.75})
    client.send("finish", status="done")


def follow(context: RoleContext, orders: dict[str, Any]) -> None:
    misbehave(context, orders, 1)
    while not context.client.view["stop"]:
        time.sleep(0.05)


def misbehave(context: RoleContext, orders: dict[str, Any], step: int) -> None:
    if orders.get("fail_at") == step:
        raise getattr(errors, orders["error"])(f"{context.peer} fails in step {step}, as ordered")
    while orders.get("hang_at") == step:
        view = context.client.view
        if view["stop"] and not orders.get("ignore_term"):
            raise errors.Stopped(view["stop"])
        time.sleep(0.05)


def wait_for_groups(context: RoleContext, step: int) -> list[int] | None:
    n = context.config.algorithm.groups_per_step

    def complete(view: dict[str, Any]) -> list[int] | str | None:
        if view["boundary_stop"]:
            return "stop"
        ids = sorted(g["group_id"] for shard in view["shards"].values() for g in shard["groups"])
        return ids[:n] if len(ids) >= n else None

    while True:
        view = context.client.view
        if view["unsynced"]:
            hand_over(context, step - 1)
        found = context.client.poll_for(complete, 0.5)
        if found is not None:
            return found if isinstance(found, list) else None


def hand_over(context: RoleContext, version: int) -> None:
    """The trainer's side of a transfer, without a transfer."""
    client = context.client

    def acknowledged(view: dict[str, Any]) -> dict[str, Any] | None:
        door = view["door"]
        whole = door and door["version"] == version and door["go"] and door["members"]
        return door if whole and set(door["acks"]) == set(door["members"]) else None

    client.send("open_door", version=version, store=STORE)
    door = client.wait_for(acknowledged, timeout_s=30.0, what=f"version {version}")
    client.send("commit", epoch=door["epoch"], version=version)
    client.wait_for(lambda view: not view["door"], timeout_s=30.0, what="the commit")


def play(context: RoleContext) -> None:
    orders = json.loads(os.environ.get("FAKE_ROLES", "{}")).get(context.peer, {})
    if orders.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    role = fake_engine if context.peer.startswith("engine") else fake_trainer
    role(context, orders)


def supervise(root: Path) -> int:
    from slurm_grpo.supervisor import supervisor

    run = RunDir(root)
    cfg: Config = read_frozen(run.config)
    modules = {"engine": "fakes", "trainer": "fakes"}
    return supervisor.supervise(run, cfg, role_modules=modules).exit_code


if __name__ == "__main__":
    if sys.argv[1:2] == ["supervise"]:
        try:
            sys.exit(supervise(Path(sys.argv[2])))
        except errors.ConfigError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(error.exit_code)
    run_role(play)
