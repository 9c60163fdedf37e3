"""Picking a step's groups, with a control plane that shows what a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.config.schema import AlgorithmConfig, Config
from slurm_grpo.staging.manifest import ResumeState
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.trainer.picker import Picker


class Client:
    """A view, and the messages sent."""

    def __init__(self) -> None:
        self.view: dict[str, Any] = {"shards": [], "engines": {}}
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **body: Any) -> None:
        self.sent.append((kind, body))


def test_a_damaged_shard_is_given_up_once_however_long_the_view_still_shows_it(
    tmp_path: Path,
) -> None:
    run, client = make_run(tmp_path), Client()
    cfg = Config(algorithm=AlgorithmConfig(groups_per_step=2))
    nothing = ResumeState(
        next_group=0, n_dropped=0, consumed=frozenset(), dropped=frozenset(), available=[]
    )
    picker = Picker(cfg, run, 0, client, nothing)  # type: ignore[arg-type]
    groups = [make_group(0), make_group(1)]
    damaged = publish_groups(run, groups, make_header())
    path = run.root / damaged.path
    path.write_bytes(b"x" * damaged.size_bytes)
    client.view["shards"] = {damaged.path: damaged.to_json()}

    assert picker.poll(1) is None
    assert picker.poll(1) is None

    assert client.sent == [("lost", {"group_ids": [0, 1]})]
    whole = publish_groups(run, groups, make_header(sequence=1))
    client.view["shards"] = {whole.path: whole.to_json()}
    plan = picker.poll(1)
    assert plan is not None
    assert [group.group_id for group, _ in plan.groups] == [0, 1]
