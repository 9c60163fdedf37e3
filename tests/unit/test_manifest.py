"""Manifest fencing, and what a resume may build on."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sample_episodes import make_group, make_header, make_run
from slurm_grpo.errors import SchemaVersionError, ShardError
from slurm_grpo.fsio import write_durably
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.manifest import (
    Manifest,
    ResumeState,
    committed_manifests,
    load_state,
    publish_manifest,
    read_manifest,
)
from slurm_grpo.staging.shards import ShardRef, publish_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def _begin(run: RunDir, attempt: int, resumed_from: int | None) -> None:
    """Take an attempt; None: it died before its trainer wrote where it starts from."""
    run.attempt(attempt).root.mkdir()
    if resumed_from is not None:
        write_durably(run.attempt(attempt).resumed_from, f"{resumed_from}\n".encode())


def _manifest(step: int, attempt: int, *groups: int, dropped: tuple[int, ...] = ()) -> Manifest:
    return Manifest(
        step=step,
        attempt=attempt,
        groups=tuple((g, f"episodes/{g}.h5") for g in groups),
        dropped=dropped,
    )


def _shard(
    run: RunDir,
    ids: list[int],
    version: int,
    *,
    newest: int | None = None,
    attempt: int = 0,
    incarnation: int = 0,
    sequence: int = 0,
) -> ShardRef:
    groups = [
        make_group(g, n_episodes=1, oldest_version=version, newest_version=newest) for g in ids
    ]
    header = make_header(attempt=attempt, incarnation=incarnation, sequence=sequence)
    return publish_groups(run, groups, header)


def _strict(run: RunDir, resume_step: int, groups_per_step: int = 2) -> ResumeState:
    return load_state(
        run,
        resume_step,
        strict=True,
        groups_per_step=groups_per_step,
        max_staleness=0,
        deadline_s=0,
    )


def _usable(state: ResumeState) -> list[tuple[str, list[int]]]:
    return [(ref.path, [g.group_id for g in ref.groups]) for ref in state.available]


def test_a_manifest_reads_back_and_publishing_it_again_is_harmless(run: RunDir) -> None:
    _begin(run, 0, 0)
    manifest = _manifest(1, 0, 4, 2, dropped=(3,))
    path = publish_manifest(run, manifest)
    assert publish_manifest(run, manifest) == path
    assert read_manifest(path) == manifest


def test_a_twin_of_the_same_attempt_cannot_publish_other_groups(run: RunDir) -> None:
    path = publish_manifest(run, _manifest(1, 0, 1, 2))
    with pytest.raises(ShardError, match=r"step_000001-attempt_000\.json: exists with other"):
        publish_manifest(run, _manifest(1, 0, 1, 3))
    assert read_manifest(path) == _manifest(1, 0, 1, 2)


def test_a_stale_attempt_cannot_publish_once_a_later_one_has_begun(run: RunDir) -> None:
    _begin(run, 0, 0)
    _begin(run, 1, None)
    with pytest.raises(ShardError, match="attempt 0 is stale, attempt 1 has begun"):
        publish_manifest(run, _manifest(1, 0, 1, 2))
    publish_manifest(run, _manifest(1, 1, 1, 2))
    assert len(list(run.manifests.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged: JSONDecodeError"),
        ('{"schema": "slurm_grpo.manifest/1", "step": 1}', "damaged: KeyError: 'attempt'"),
        ('{"schema": "slurm_grpo.manifest/2"}', "expected 'slurm_grpo.manifest/1'"),
    ],
)
def test_a_damaged_committed_manifest_stops_a_resume(run: RunDir, text: str, message: str) -> None:
    path = publish_manifest(run, _manifest(1, 0, 0, 1))
    path.write_text(text)
    with pytest.raises(ShardError, match=message) as caught:
        _strict(run, 1)
    assert str(path) in str(caught.value)


def test_a_missing_committed_manifest_stops_a_resume(run: RunDir) -> None:
    publish_manifest(run, _manifest(1, 0, 0, 1))
    publish_manifest(run, _manifest(3, 0, 4, 5))
    with pytest.raises(ShardError, match=r"no committed manifest of step 2 \(1 missing up to 3\)"):
        _strict(run, 3)


def test_a_manifest_that_a_listing_shows_late_is_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        publish_manifest(run, _manifest(step, 0, 2 * step - 2, 2 * step - 1))
    listings = [["step_000001-attempt_000.json"], os.listdir(run.manifests)]
    monkeypatch.setattr("os.listdir", lambda path: listings.pop(0))
    found = committed_manifests(run, 2)
    assert [m.step for m in found] == [1, 2]


def test_a_shard_of_a_newer_program_stops_a_resume_and_stays_where_it_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begin(run, 0, 0)
    monkeypatch.setattr("slurm_grpo.staging.layout.SCHEMA_VERSION", (2, 0))
    ref = _shard(run, [0, 1], 0)
    monkeypatch.undo()
    with pytest.raises(SchemaVersionError, match=r"schema version 2\.0") as caught:
        _strict(run, 0)
    assert ref.path in str(caught.value)
    assert (run.root / ref.path).exists()


def test_a_malformed_resumed_from_is_named(run: RunDir) -> None:
    run.attempt(0).root.mkdir()
    run.attempt(0).resumed_from.write_text("many")
    with pytest.raises(ShardError, match=r"attempts/0/resumed_from: expected a step.*'many'"):
        _strict(run, 0)


def test_a_fresh_run_starts_at_group_0(run: RunDir) -> None:
    _begin(run, 0, 0)
    state = _strict(run, 0)
    assert (state.next_group, state.n_dropped, state.available) == (0, 0, [])


def test_steps_and_episodes_beyond_a_later_start_do_not_count(run: RunDir) -> None:
    _begin(run, 0, 0)
    for step in (1, 2, 3):
        _shard(run, [2 * step - 2, 2 * step - 1], step - 1, sequence=step)
        publish_manifest(run, _manifest(step, 0, 2 * step - 2, 2 * step - 1))
    _begin(run, 1, 1)  # from a checkpoint at step 1; its own step 2 drops group 2
    _shard(run, [2, 3], 1, attempt=1)
    publish_manifest(run, _manifest(2, 1, 3, 4, dropped=(2,)))
    _begin(run, 2, 2)
    state = _strict(run, 2)
    assert state.consumed == {0, 1, 3, 4}
    assert state.dropped == {2}
    assert (state.next_group, state.n_dropped) == (5, 1)
    assert state.available == []  # version 2 of attempt 0 is not the version 2 of attempt 1

    state = _strict(run, 1)  # as if attempt 2 started from step 1 as well
    first, *_ = state.available
    assert state.next_group == 2
    assert first.attempt == 0  # its share of step 2 came first


def test_an_attempt_that_never_wrote_its_start_changes_nothing(run: RunDir) -> None:
    _begin(run, 0, 0)
    publish_manifest(run, _manifest(1, 0, 0, 1))
    _shard(run, [2, 3], 1)
    _begin(run, 1, None)
    _begin(run, 2, 1)
    state = _strict(run, 1)
    assert [ids for _, ids in _usable(state)] == [[2, 3]]


def test_strict_mode_uses_a_share_whole_or_not_at_all(run: RunDir) -> None:
    publish_manifest(run, _manifest(1, 0, 0, 1))
    _shard(run, [1, 2], 1)  # group 1 is consumed
    _shard(run, [3, 4], 1, sequence=1)  # group 4 belongs to a later step
    assert _strict(run, 1).available == []
    ready = load_state(run, 1, strict=False, groups_per_step=2, max_staleness=0)
    assert [ids for _, ids in _usable(ready)] == [[2], [3, 4]]


def test_of_two_shards_with_one_group_the_earliest_is_used(run: RunDir) -> None:
    late = _shard(run, [0, 1], 0, incarnation=1, sequence=0)
    early = _shard(run, [0, 1], 0, incarnation=0, sequence=7)
    for strict in (True, False):
        state = load_state(run, 0, strict=strict, groups_per_step=2, max_staleness=0)
        assert _usable(state) == [(early.path, [0, 1])]
    (run.root / early.path).unlink()
    assert _usable(_strict(run, 0)) == [(late.path, [0, 1])]


def test_staleness_counts_the_oldest_token_and_validity_the_newest(run: RunDir) -> None:
    publish_manifest(run, _manifest(1, 0, 0, 1))
    publish_manifest(run, _manifest(2, 0, 2, 3))
    _shard(run, [4], 0, newest=2)
    _shard(run, [5], 1, newest=2, sequence=1)
    _shard(run, [6], 2, newest=3, sequence=2)
    state = load_state(run, 2, strict=False, groups_per_step=2, max_staleness=1)
    assert [ids for _, ids in _usable(state)] == [[5]]


def test_a_damaged_leftover_is_quarantined_with_a_warning(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    bad = _shard(run, [0, 1], 0)
    good = _shard(run, [0, 1], 0, sequence=1)
    path = run.root / bad.path
    path.write_bytes(path.read_bytes()[:-1])
    state = load_state(run, 0, strict=True, groups_per_step=2, max_staleness=0, deadline_s=0.01)
    assert _usable(state) == [(good.path, [0, 1])]
    assert not path.exists()
    assert (run.episodes / "quarantine" / path.name).exists()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"{bad.size_bytes - 1} of {bad.size_bytes}" in caplog.text


def test_a_resume_sweeps_what_killed_writers_left(run: RunDir) -> None:
    for directory in (run.episodes, run.manifests):
        temporary = directory / ".x.0123456789abcdef.tmp"
        temporary.touch()
        os.utime(temporary, (0, 0))
    _strict(run, 0)
    assert [*run.episodes.iterdir(), *run.manifests.iterdir()] == []


# Random histories against a brute-force reading of the rule.


@dataclass
class History:
    """What happened, told by one who saw it all; the code under test sees the files only."""

    starts: list[int | None] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    shards: list[tuple[int, ShardRef, list[int], int, int]] = field(default_factory=list)
    """(attempt, ref, group ids, oldest version, newest version), in order of preference."""

    def holds(self, attempt: int, number: int, resume_step: int) -> bool:
        """The rule, word for word."""
        later = [s for s in self.starts[attempt + 1 :] if s is not None]
        return all(number <= start for start in [*later, resume_step])


def _live(
    run: RunDir, history: History, rng: random.Random, *, strict: bool, staleness: int
) -> None:
    """One attempt: start from some checkpoint, generate and train a while, die."""
    per_step = 2
    attempt = len(history.starts)
    reached = max((m.step for m in history.manifests if m.attempt == attempt - 1), default=None)
    last_start = next((s for s in reversed(history.starts) if s is not None), 0)
    start = rng.randint(last_start if rng.random() < 0.8 else 0, reached or last_start)
    if rng.random() < 0.15:
        _begin(run, attempt, None)
        history.starts.append(None)
        return
    state = load_state(run, start, strict=strict, groups_per_step=per_step, max_staleness=staleness)
    _begin(run, attempt, start)
    history.starts.append(start)
    done = set(state.consumed | state.dropped)
    ready = {g.group_id for ref in state.available for g in ref.groups}
    sequence = 0
    for step in range(start + 1, start + 1 + rng.randint(0, 4)):
        wanted = [g for g in range(per_step * 40) if g not in done]
        missing = [g for g in wanted[: per_step + rng.randint(0, staleness)] if g not in ready]
        n_copies = 2 if rng.random() < 0.2 else 1  # an engine killed before it could announce
        for incarnation in range(n_copies if missing else 0):
            oldest = max(step - 1 - (0 if strict else rng.randint(0, staleness + 1)), 0)
            newest = step - 1
            ref = _shard(
                run, missing, oldest, newest=newest, attempt=attempt, incarnation=incarnation,
                sequence=sequence,
            )  # fmt: skip
            history.shards.append((attempt, ref, missing, oldest, newest))
            sequence += 1
        ready.update(missing)
        if rng.random() < 0.2:
            return  # killed between publishing and training
        pool = [g for g in wanted if g in ready]
        dropped = (pool.pop(0),) if not strict and len(pool) > per_step else ()
        manifest = _manifest(step, attempt, *pool[:per_step], dropped=dropped)
        publish_manifest(run, manifest)
        history.manifests.append(manifest)
        done.update(pool[:per_step], dropped)
        ready -= done


def _oracle(
    history: History, resume_step: int, *, strict: bool, staleness: int
) -> tuple[set[int], set[int], dict[str, list[int]]]:
    committed = [m for m in history.manifests if history.holds(m.attempt, m.step, resume_step)]
    consumed = {g for m in committed for g, _ in m.groups}
    dropped = {g for m in committed for g in m.dropped}
    first = min(set(range(1000)) - consumed - dropped)
    used: set[int] = set()
    available: dict[str, list[int]] = {}
    key = lambda s: s[1].path.split("-a")[1][:19]  # noqa: E731 (attempt, incarnation, sequence)
    for attempt, ref, ids, oldest, newest in sorted(history.shards, key=key):
        if not history.holds(attempt, newest, resume_step) or resume_step - oldest > staleness:
            continue
        free = [g for g in ids if g not in consumed | dropped | used]
        if strict and (free != ids or not set(ids) <= {first, first + 1}):
            continue
        if free:
            available[ref.path] = free
            used.update(free)
    return consumed, dropped, available


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", range(7))
def test_random_histories_resume_as_the_rule_says(run: RunDir, seed: int, strict: bool) -> None:
    rng = random.Random(f"{seed}/{strict}")
    staleness = 0 if strict else rng.randint(0, 2)
    history = History()
    for _ in range(rng.randint(1, 5)):
        _live(run, history, rng, strict=strict, staleness=staleness)
    last = max((m.step for m in history.manifests), default=0)
    for resume_step in range(last + 1):
        steps = {m.step for m in history.manifests if history.holds(m.attempt, m.step, resume_step)}
        if steps != set(range(1, resume_step + 1)):
            with pytest.raises(ShardError, match="no committed manifest"):
                load_state(
                    run,
                    resume_step,
                    strict=strict,
                    groups_per_step=2,
                    max_staleness=staleness,
                    deadline_s=0,
                )
            continue
        state = load_state(
            run, resume_step, strict=strict, groups_per_step=2, max_staleness=staleness
        )
        consumed, dropped, available = _oracle(
            history, resume_step, strict=strict, staleness=staleness
        )
        assert state.consumed == consumed
        assert state.dropped == dropped
        assert state.n_dropped == len(dropped)
        assert state.next_group == min(set(range(1000)) - consumed - dropped)
        assert dict(_usable(state)) == available
        if strict:
            assert consumed == set(range(2 * resume_step))
