"""What the audit of a run finds, and what it lets pass."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sample_episodes import (
    begin_attempt,
    commit_step,
    make_books,
    make_header,
    make_run,
    publish_ids,
    take_step,
)
from slurm_grpo.errors import ConfigError, ExitCode
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging.ledger import record_retired
from slurm_grpo.staging.shards import list_shards, quarantine_shard
from slurm_grpo.staging.verify import add_arguments, audit_run, verify_run
from slurm_grpo.staging.verify import run as run_command


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_books(tmp_path_factory.mktemp("original"))
    for step in (1, 2, 3):
        take_step(run, step)
    return run.root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> RunDir:
    """Three steps of two groups each, on-policy, and all of them whole."""
    return RunDir(shutil.copytree(original, tmp_path / "run"))


def of_version(run: RunDir, version: int) -> str:
    """The path of a shard for step 4."""
    return publish_ids(run, 6, 7, version=version, header=make_header(sequence=4))


def test_a_whole_run_has_no_finding_and_no_note(run: RunDir) -> None:
    audit = audit_run(run)
    assert (audit.findings, audit.notes) == ([], [])
    assert (audit.n_shards, audit.n_groups, audit.n_committed, audit.n_trained) == (3, 6, 3, 6)


def test_an_empty_run_is_whole(tmp_path: Path) -> None:
    assert verify_run(make_run(tmp_path)) == []


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _of_step(run: RunDir, number: int) -> Path:
    return next(run.root / path for path, name in list_shards(run) if name.sequence == number)


def _rewrite(run: RunDir, number: int, change: Callable[[str], str]) -> None:
    path = run.manifests / f"step_{number:06d}-attempt_000.json"
    path.write_text(change(path.read_text()))


def _retire(run: RunDir, number: int, *, step: int) -> Path:
    path = _of_step(run, number)
    record_retired(run, [str(path.relative_to(run.root))], step=step, attempt=0)
    return path


def _cut_record(run: RunDir) -> None:
    record_retired(run, ["x"], step=1, attempt=0)
    (path,) = (run.episodes / "ledger").iterdir()
    path.write_text(path.read_text()[:10])


DAMAGE: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "a flipped byte": (lambda run: _flip(_of_step(run, 2)), r"v000001-.*\.h5: CRC"),
    "a short shard": (
        lambda run: os.truncate(_of_step(run, 2), 1000),
        r"read .*v000001-.*\.h5: has 1000 of \d+ bytes",
    ),
    "a lost shard": (lambda run: _of_step(run, 2).unlink(), r"group 2 of .*v000001.* is missing"),
    "a shard in quarantine": (
        lambda run: quarantine_shard(run, str(_of_step(run, 2).relative_to(run.root)), "test"),
        r"step 2 .*group 2 of .*: it is in quarantine",
    ),
    "a renamed shard": (
        lambda run: _of_step(run, 2).rename(str(_of_step(run, 2)).replace("s000002", "s000007")),
        r"sequence is 2 in the file, 7 in its name",
    ),
    "a lost manifest": (
        lambda run: (run.manifests / "step_000002-attempt_000.json").unlink(),
        r"manifests: no committed manifest of step 2\.",
    ),
    "a torn manifest": (
        lambda run: _rewrite(run, 2, lambda text: text[:20]),
        r"manifest .*step_000002-attempt_000\.json: damaged",
    ),
    "a manifest of another step": (
        lambda run: _rewrite(run, 2, lambda text: text.replace('"step": 2', '"step": 3')),
        r"step_000002-attempt_000\.json: holds step 3 of attempt 0",
    ),
    "a group that its shard lacks": (
        lambda run: _rewrite(run, 2, lambda text: text.replace("[2, ", "[9, ")),
        r"step 2 \(attempt 0\): group 9 of .* has no such group",
    ),
    "a group trained twice": (
        lambda run: take_step(run, 4, 0, 6),
        r"step 4 .*group 0 was trained in",
    ),
    "a group dropped and trained": (
        lambda run: commit_step(run, 4, of_version(run, 3), 6, 7, dropped=(1,)),
        r"step 1: group 1 was trained, but step 4 has dropped it",
    ),
    "too stale a group": (
        lambda run: commit_step(run, 4, of_version(run, 1), 6, 7),
        r"group 6 of .*: staleness 2, allowed 0 \(algorithm\.max_staleness\)",
    ),
    "a group from the future": (
        lambda run: commit_step(run, 4, of_version(run, 4), 6, 7),
        r"group 6 of .*: of version 4, which did not exist yet",
    ),
    "a group too few": (lambda run: take_step(run, 4, 6), r"step 4 .*: 1 groups, not 2"),
    "a group published twice by one life": (
        lambda run: publish_ids(run, 2, version=1, header=make_header(sequence=9)),
        r"group 2: published twice by one engine life: episodes/.*h5, episodes/.*h5",
    ),
    "a shard of an attempt that never was": (
        lambda run: publish_ids(run, 9, version=0, header=make_header(attempt=5)),
        r"attempt 5 never began .*attempts/5/resumed_from is missing",
    ),
    "a shard retired too early": (
        lambda run: _retire(run, 2, step=1).unlink(),
        r"step 2 .*group 2 of .*: retired when the checkpoint of step 1 was the newest",
    ),
    "a damaged ledger": (
        _cut_record,
        r"retired-step_000001-attempt_000\.json: damaged",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_the_file_or_step_named(
    run: RunDir, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_grpo.staging.verify.READ_DEADLINE_S", 0.0)
    damage, says = DAMAGE[what]
    damage(run)
    findings = verify_run(run)
    assert [text for text in findings if re.search(says, text)], findings


def test_a_resumed_run_is_whole_and_what_it_replaced_is_noted(run: RunDir) -> None:
    begin_attempt(run, 1, 1)
    for step in (2, 3, 4):
        take_step(run, step)
    audit = audit_run(run)
    assert audit.findings == []
    assert (audit.n_committed, audit.n_trained) == (4, 8)
    assert audit.notes == [
        "2 manifests of steps that a later attempt took again",
        "2 groups published again by another engine life",
        "2 groups of versions that a later attempt took again",
    ]


def test_training_on_what_a_later_attempt_replaced_is_found(run: RunDir) -> None:
    path = str(_of_step(run, 3).relative_to(run.root))  # version 2 of attempt 0
    begin_attempt(run, 1, 1)
    take_step(run, 2)
    commit_step(run, 3, path, 4, 5)
    (first, _) = verify_run(run)
    assert "of version 2, which attempt 0 lost when a later one resumed from step 1" in first


def test_a_copy_by_a_restarted_engine_is_a_note(run: RunDir) -> None:
    publish_ids(run, 2, version=1, header=make_header(incarnation=1))
    audit = audit_run(run)
    assert audit.findings == []
    assert "1 group published again by another engine life" in audit.notes


def test_what_is_in_flight_or_left_over_is_a_note(run: RunDir) -> None:
    (run.episodes / f".x.h5.{'0' * 16}.tmp").write_bytes(b"half")
    damaged = publish_ids(run, 6, version=3, header=make_header(sequence=4))
    quarantine_shard(run, damaged, "its CRC is wrong")
    publish_ids(run, 6, version=3, header=make_header(sequence=5))
    audit = audit_run(run)
    assert audit.findings == []
    assert audit.notes[0] == "1 group that no step has trained on"
    assert audit.notes[1].startswith("1 temporary in ")
    assert audit.notes[2].endswith(": its CRC is wrong")


def test_a_retired_shard_is_not_missed(run: RunDir) -> None:
    _retire(run, 1, step=1).unlink()
    audit = audit_run(run)
    assert audit.findings == []
    assert audit.notes == ["1 shard retired, as `staging.keep` says"]


def test_a_newer_major_version_is_a_finding_that_names_the_shard(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_grpo.staging.layout.SCHEMA_VERSION", (2, 0))
    path = take_step(run, 4)
    monkeypatch.undo()
    (found,) = verify_run(run)
    assert path in found
    assert "schema version 2.0" in found


def test_the_command_prints_findings_and_exits_non_zero(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([str(run.root)])
    assert run_command(arguments) == ExitCode.OK
    summary = "3 shards with 6 groups, 3 steps trained on 6 groups"
    assert capsys.readouterr().out == f"{run.root}: {summary}: whole\n"
    _flip(_of_step(run, 2))
    assert run_command(arguments) == ExitCode.FAILURE
    finding, last = capsys.readouterr().out.splitlines()
    assert finding.startswith("finding: shard ")
    assert last.endswith("3 steps trained on 6 groups: 1 finding(s)")
    with pytest.raises(ConfigError, match="no run directory"):
        run_command(parser.parse_args([str(run.root / "nowhere")]))
