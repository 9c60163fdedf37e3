"""Picking a step's groups, with a control plane that shows what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.config.schema import AlgorithmConfig, Config
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import Manifest, ResumeState, load_state, read_manifest
from slurm_grpo.staging.shards import publish_groups
from slurm_grpo.trainer.picker import Picker

RULES = AlgorithmConfig(groups_per_step=2, drop_zero_spread=True)
NOTHING = ResumeState(
    next_group=0, n_dropped=0, consumed=frozenset(), dropped=frozenset(), available=[]
)


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
    picker = Picker(Config(algorithm=RULES), run, 0, client, NOTHING)  # type: ignore[arg-type]
    picker.first_spare(0, [])
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


def show(
    run: RunDir, client: Client, ids: Sequence[int], *, useless: Sequence[int] = (), v: int = 0
) -> None:
    """Publish groups of version `v`, those in `useless` without a spread, and announce them."""
    groups = []
    for g in ids:
        group = make_group(g, oldest_version=v)
        groups.append([replace(e, reward=1.0) for e in group] if g in useless else group)
    ref = publish_groups(run, groups, make_header(sequence=min(ids)))
    client.view["shards"] = {**(client.view["shards"] or {}), ref.path: ref.to_json()}


def manifest_of(run: RunDir, step: int) -> Manifest:
    return read_manifest(run.manifests / f"step_{step:06d}-attempt_000.json")


def test_a_strict_step_judges_whole_rounds_and_the_next_asks_for_what_they_let_expect(
    tmp_path: Path,
) -> None:
    run, client = make_run(tmp_path), Client()
    picker = Picker(Config(algorithm=RULES), run, 0, client, NOTHING)  # type: ignore[arg-type]
    assert picker.first_spare(0, []) == 0

    show(run, client, [1])
    assert picker.poll(1) is None
    assert client.sent == [], "half a round says nothing"
    show(run, client, [0], useless=[0])
    assert picker.poll(1) is None
    dropped = {"version": 0, "group_ids": [], "dropped": [0], "spare": 0}
    assert client.sent.pop() == ("consumed", dropped)
    show(run, client, [2])
    plan = picker.poll(1)
    assert plan is not None
    assert [g.group_id for g, _ in plan.groups] == [1, 2]
    assert (plan.n_dropped_no_signal, plan.n_surplus, plan.n_rounds) == (1, 0, 2)
    assert [g.group_id for g, _ in plan.set_aside] == [0]
    # Two of three were useful, so three are asked for: one more than are needed.
    trained = {"version": 1, "group_ids": [1, 2], "dropped": [], "spare": 1}
    assert client.sent.pop() == ("consumed", trained)

    show(run, client, [5], v=1)
    assert picker.poll(2) is None
    show(run, client, [3, 4], v=1)
    plan = picker.poll(2)
    assert plan is not None
    assert [g.group_id for g, _ in plan.groups] == [3, 4], "by id, whoever finishes first"
    assert (plan.n_surplus, [g.group_id for g, _ in plan.set_aside]) == (1, [5])
    manifest = manifest_of(run, 2)
    assert (manifest.dropped, manifest.surplus, manifest.usefulness) == ((5,), (5,), (3, 3))
    assert client.sent.pop()[1] == {"version": 2, "group_ids": [3, 4], "dropped": [5], "spare": 1}


def test_a_resumed_picker_asks_for_what_the_uninterrupted_one_asked_for(tmp_path: Path) -> None:
    run, client = make_run(tmp_path), Client()
    cfg = Config(algorithm=RULES)
    picker = Picker(cfg, run, 0, client, NOTHING)  # type: ignore[arg-type]
    picker.first_spare(0, [])
    next_group = 0
    for step in range(1, 9):
        n = 2 if step == 1 else 2 + client.sent[-1][1]["spare"]
        while True:
            useless = [g for g in range(next_group, next_group + n) if g % 3 == 1]
            show(run, client, range(next_group, next_group + n), useless=useless, v=step - 1)
            next_group += n
            if picker.poll(step) is not None:
                break
            n = client.sent[-1][1]["spare"] + 2 - (n - len(useless))
        state = load_state(
            run, step, strict=True, groups_per_step=2, max_staleness=0, oversample=4.0
        )
        assert state.next_group == next_group
        again = Picker(cfg, run, 1, Client(), state)  # type: ignore[arg-type]
        assert again.first_spare(step, state.available) == client.sent[-1][1]["spare"]


def test_the_next_step_uses_what_this_one_did_not_need_where_staleness_allows(
    tmp_path: Path,
) -> None:
    run, client = make_run(tmp_path), Client()
    cfg = Config(algorithm=replace(RULES, order="ready", max_staleness=1))
    picker = Picker(cfg, run, 0, client, NOTHING)  # type: ignore[arg-type]
    show(run, client, [0, 1, 2, 3, 4])
    plans = [picker.poll(1), picker.poll(2)]
    assert [[g.group_id for g, _ in plan.groups] for plan in plans if plan] == [[0, 1], [2, 3]]
    assert [plan.n_surplus for plan in plans if plan] == [0, 1], "group 4 is stale for step 3"
    show(run, client, [5])
    assert picker.poll(3) is None
    assert client.sent[-1][1]["dropped"] == [5]


def test_verdicts_are_forgotten_with_their_shards(tmp_path: Path) -> None:
    run, client = make_run(tmp_path), Client()
    picker = Picker(Config(algorithm=RULES), run, 0, client, NOTHING)  # type: ignore[arg-type]
    picker.first_spare(0, [])
    for step in range(1, 6):
        client.view["shards"] = {}
        show(run, client, [2 * step - 2, 2 * step - 1], v=step - 1)
        assert picker.poll(step) is not None
    assert len(picker._verdicts) == 1
