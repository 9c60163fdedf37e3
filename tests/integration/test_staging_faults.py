"""Episodes on a file system that breaks: none lost, none trained twice, none trained damaged, and
each error names the file.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import pytest

from faults import arm, disarm, hide, run_broken, step_clock
from sample_episodes import assert_same_groups
from slurm_grpo.errors import ShardError, StorageError
from slurm_grpo.fsio import sweep_temporaries, write_durably
from slurm_grpo.run.attempt import take_attempt
from slurm_grpo.run.checkpoints import COMPLETE, complete_steps
from slurm_grpo.run.directory import RunDir
from slurm_grpo.staging import layout
from slurm_grpo.staging.compact import compact_run
from slurm_grpo.staging.manifest import Manifest, committed_manifests, publish_manifest
from slurm_grpo.staging.shards import ShardRef, list_shards, read_groups, verify_shard
from slurm_grpo.staging.verify import audit_run, verify_run
from staged_run import (
    assert_exactly_once,
    attempt,
    attempt_until_done,
    generated,
    new_run,
    publish,
)

N_STEPS = 4
PLACES = ("/episodes", "/manifests", "/attempts")
OPS = {
    "open": ("fail",),
    "write": ("fail", "short"),
    "read": ("fail", "short"),
    "fsync": ("fail",),
    "close": ("fail",),
    "rename": ("fail", "lost reply"),
    "link": ("fail", "lost reply"),
    "unlink": ("fail", "lost reply"),
    "mkdir": ("fail", "lost reply"),
}


def every_fault(folder: str, where: str, numbers: list[int], stride: int) -> dict[str, Any]:
    """A run for every call that may fail under `where`, each made to fail in every way."""
    counts: dict[str, int] = {}
    wrong: list[str] = []
    for op, modes in OPS.items():
        for mode in modes:
            for number in numbers if mode != "short" else [0]:
                n, n_seen = 1, 1
                while n <= n_seen:
                    run = new_run(Path(folder) / "run", keep_steps=1)
                    arm(op, where, n, mode, number)
                    n_seen, problem = outcome(run)
                    if n <= n_seen:
                        counts[f"{op} {mode}"] = counts.get(f"{op} {mode}", 0) + 1
                    if problem:
                        name = errno.errorcode.get(number, "")
                        wrong.append(f"{op} {n} of {n_seen}, {mode} {name}, {where}: {problem}")
                    n += stride
                    shutil.rmtree(run.root)
    return {"counts": counts, "wrong": wrong}


def outcome(run: RunDir) -> tuple[int, str | None]:
    """How many calls were looked at, and what is wrong after all; None: nothing."""
    try:
        errors = attempt_until_done(run, N_STEPS, keep_steps=1)
        n_seen = disarm()
        assert_exactly_once(run, N_STEPS)
    except (AssertionError, OSError) as error:
        return disarm(), f"{type(error).__name__}: {error}"
    unnamed = [text for text in errors if str(run.root) not in text]
    return n_seen, f"no file named: {unnamed}" if unnamed else None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("numbers", "stride"),
    [([errno.EIO], 17), pytest.param([errno.EIO, errno.ESTALE], 1, marks=pytest.mark.slow)],
)
def test_a_call_that_fails_comes_short_or_loses_its_reply(
    tmp_path: Path, shim: Path, where: str, numbers: list[int], stride: int
) -> None:
    found = run_broken(shim, every_fault, str(tmp_path), where, numbers, stride)
    assert found["wrong"] == []
    assert all(found["counts"].get(f"{op} fail") for op in ("open", "write", "fsync", "close"))


def killed_before_a_call(folder: str, what: str, stride: int) -> int:
    """Fork, and kill the child before its nth call that writes; then go on without. The last n."""
    nth = 1
    while True:
        run = new_run(Path(folder) / "run", keep_steps=1 if what == "attempt" else None)
        if what == "compact":
            attempt(run, N_STEPS)
        child = os.fork()
        if child == 0:
            arm("any", "/run", nth, "kill")
            work(run, what)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if what == "compact":
            assert verify_run(run) == []
        work(run, what)
        assert_exactly_once(run, N_STEPS)
        if what == "compact":
            assert [n.sequence for _, n in list_shards(run)] == [1]
        shutil.rmtree(run.root)
        if status == 0:
            return nth
        assert os.WTERMSIG(status) == signal.SIGKILL
        nth += stride


def work(run: RunDir, what: str) -> None:
    if what == "compact":
        compact_run(run)
    else:
        attempt_until_done(run, N_STEPS, keep_steps=1)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("what", "at_least"), [("attempt", 100), ("compact", 30)])
def test_a_kill_before_any_call_that_writes(
    tmp_path: Path, shim: Path, what: str, at_least: int, stride: int
) -> None:
    assert run_broken(shim, killed_before_a_call, str(tmp_path), what, stride) >= at_least


def random_history(folder: str, seed: int) -> dict[str, int]:
    """Faults, compactions and lost checkpoints in a random order, and then on to the end."""
    rng = random.Random(seed)
    run = new_run(Path(folder) / f"run-{seed}", keep_steps=(keep_steps := rng.choice([None, 1, 3])))
    happened = dict.fromkeys(("faults", "compactions", "fall-backs"), 0)
    for n_steps in range(2, 12):
        op = rng.choice(list(OPS))
        number = rng.choice([errno.EIO, errno.ENOSPC, errno.ESTALE])
        where = f"/run-{seed}{rng.choice(PLACES)}"
        arm(op, where, rng.randint(1, 30), rng.choice(OPS[op]), number)
        errors = attempt_until_done(run, n_steps, keep_steps=keep_steps)
        disarm()
        happened["faults"] += len(errors)
        assert_exactly_once(run, n_steps)
        if rng.random() < 0.3:
            happened["compactions"] += compact_run(run).n_made
            assert_exactly_once(run, n_steps)
        if rng.random() < 0.3 and len(complete_steps(run)) > 1:
            (run.checkpoint(complete_steps(run)[-1]) / COMPLETE).unlink()
            happened["fall-backs"] += 1
    attempt_until_done(run, 12, keep_steps=keep_steps)
    assert_exactly_once(run, 12)
    return happened


@pytest.mark.parametrize("n_seeds", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_any_history_of_faults_compactions_and_fall_backs_trains_each_group_once(
    tmp_path: Path, shim: Path, n_seeds: int
) -> None:
    found = [run_broken(shim, random_history, str(tmp_path), seed) for seed in range(n_seeds)]
    totals = {key: sum(history[key] for history in found) for key in found[0]}
    assert min(totals.values()) >= n_seeds / 4, totals


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("NOT RUN: only root may mount the small file system this test fills")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_named_and_the_run_goes_on_once_there_is_space(small_disk: Path) -> None:
    run = new_run(small_disk / "run")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 700_000)
    with pytest.raises(StorageError, match=r"/run/.*No space left.*free space and resume") as full:
        attempt(run, 40)
    assert str(run.root) in str(full.value)
    assert verify_run(run) == []
    n_before = audit_run(run).n_committed
    assert 0 < n_before < 40
    with pytest.raises(StorageError, match="No space left"):
        compact_run(run)
    assert verify_run(run) == []
    ballast.unlink()
    attempt_until_done(run, n_before + 2)
    assert_exactly_once(run, n_before + 2)


def test_a_disk_that_turns_read_only_is_named_and_nothing_is_lost(small_disk: Path) -> None:
    run = new_run(small_disk / "run")
    attempt(run, 2)
    remount = ["mount", "-o", "remount", "tmpfs", str(small_disk)]
    subprocess.run([*remount[:2], "remount,ro", *remount[3:]], check=True)
    for action in (lambda: attempt(run, 4), lambda: publish(run, [4, 5], 3, 0)):
        with pytest.raises(StorageError, match=r"/run.*Read-only file system.*how it is mounted"):
            action()
    assert verify_run(run) == []
    subprocess.run([*remount[:2], "remount,rw", *remount[3:]], check=True)
    attempt_until_done(run, N_STEPS)
    assert_exactly_once(run, N_STEPS)


@pytest.mark.parametrize("name", ["episodes", "manifests"])
def test_a_directory_that_vanishes_and_comes_back_is_named_and_nothing_is_lost(
    tmp_path: Path, name: str
) -> None:
    run = new_run(tmp_path / "run")
    attempt(run, 2)
    directory, away = run.root / name, tmp_path / "away"
    directory.rename(away)
    manifest = Manifest(step=3, attempt=0, groups=(), dropped=())
    action = partial(publish, run, [4, 5], 3, 0)
    with pytest.raises(StorageError, match=rf"/run/{name}/.*No such file or directory"):
        action() if name == "episodes" else publish_manifest(run, manifest)
    away.rename(directory)
    attempt_until_done(run, N_STEPS)
    assert_exactly_once(run, N_STEPS)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[tuple[RunDir, ShardRef, bytes]]:
    """A published shard to damage, and its bytes, which it gets back."""
    run = new_run(tmp_path / "run")
    take_attempt(run)
    write_durably(run.attempt(0).resumed_from, b"0\n")
    ref = publish(run, [0, 1], 1, 0)
    image = (run.root / ref.path).read_bytes()
    yield run, ref, image
    (run.root / ref.path).write_bytes(image)


@pytest.mark.parametrize("n_offsets", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_flipped_byte_is_never_trained_on(
    shard: tuple[RunDir, ShardRef, bytes], n_offsets: int | None
) -> None:
    run, ref, image = shard
    path = run.root / ref.path
    offsets = range(len(image))
    for offset in random.Random(0).sample(offsets, n_offsets) if n_offsets else offsets:
        damaged = bytearray(image)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match=r"CRC [0-9a-f]{8}, announced") as refused:
            verify_shard(run, ref, deadline_s=0)
        assert str(path) in str(refused.value)


def test_a_byte_flipped_after_rank_0_has_looked_is_caught_in_the_token_columns(
    shard: tuple[RunDir, ShardRef, bytes],
) -> None:
    run, ref, image = shard
    path = run.root / ref.path
    with h5py.File(path, locking=False) as file:
        spans = [
            (file[column.path].id.get_chunk_info(0), column.path)
            for column in layout.COLUMNS
            if column.checksum
        ]
    assert len(spans) == 5
    unnamed = 0
    for chunk, _ in spans:
        for offset in range(chunk.byte_offset, chunk.byte_offset + chunk.size):
            damaged = bytearray(image)
            damaged[offset] ^= 1 << offset % 8
            path.write_bytes(damaged)
            try:
                groups = read_groups(run, ref, [0, 1], deadline_s=0)
            except ShardError as refused:
                unnamed += str(path) not in str(refused)
            else:  # loss_mask is not read
                assert_same_groups(groups, generated([0, 1], 1))
    assert unnamed == 0


@pytest.mark.parametrize("n_lengths", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_truncated_file_is_never_trained_on(
    shard: tuple[RunDir, ShardRef, bytes], n_lengths: int | None
) -> None:
    run, ref, image = shard
    path = run.root / ref.path
    lengths = range(len(image))
    for length in random.Random(0).sample(lengths, n_lengths) if n_lengths else lengths:
        path.write_bytes(image[:length])
        for read in (verify_shard, partial(read_groups, group_ids=[0, 1])):
            with pytest.raises(ShardError, match=rf"has {length} of {len(image)} bytes") as refused:
                read(run, ref, deadline_s=0)
            assert str(path) in str(refused.value)


def test_a_damaged_shard_found_by_a_resume_is_put_aside_and_made_again(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    attempt(run, 2)
    ref = publish(run, [4, 5], 3, 0)
    data = bytearray((run.root / ref.path).read_bytes())
    data[len(data) // 2] ^= 1
    (run.root / ref.path).write_bytes(data)
    attempt_until_done(run, N_STEPS)
    assert_exactly_once(run, N_STEPS)
    (reason,) = (run.episodes / "quarantine").glob("*.reason.txt")
    assert str(run.root / ref.path) in reason.read_text()


def twins(folder: str, start_at: float) -> list[str]:
    """One of two processes that take themselves for the same attempt and the same engine life."""
    run = RunDir(Path(folder))
    time.sleep(max(0.0, start_at - time.time()))
    done = []
    for step in range(1, 21):
        ids = [2 * step - 2, 2 * step - 1]
        ref = publish(run, ids, step, 0)
        try:
            chosen = tuple((g, ref.path) for g in ids)
            publish_manifest(run, Manifest(step=step, attempt=0, groups=chosen, dropped=()))
        except ShardError as error:
            if f"publish {run.manifests}/" not in str(error):
                raise
        else:
            done.append(ref.path)
    return done


def test_a_second_writer_with_the_same_name_overwrites_nothing_and_trains_nothing_twice(
    tmp_path: Path, shim: Path
) -> None:
    run = new_run(tmp_path / "run")
    take_attempt(run)
    write_durably(run.attempt(0).resumed_from, b"0\n")
    with ThreadPoolExecutor() as pool:
        begin = time.time() + 2.0
        both = [pool.submit(run_broken, shim, twins, str(run.root), begin) for _ in range(2)]
        mine, theirs = (future.result() for future in both)
    assert len(mine) + len(theirs) == 20
    assert len(list_shards(run)) == 40  # same header, other bytes: other names, and none is lost
    assert sorted(mine + theirs) == sorted(
        {p for m in committed_manifests(run) for _, p in m.groups}
    )
    findings = verify_run(run)
    assert len(findings) == 40
    assert all("published twice by one engine life" in text for text in findings)
    shutil.rmtree(run.root)


def clock_steps(folder: str, step_s: float) -> list[str]:
    run = new_run(Path(folder) / "run")
    attempt(run, 2)
    step_clock(step_s)
    errors = attempt_until_done(run, N_STEPS)
    step_clock(0.0)
    errors += attempt_until_done(run, N_STEPS + 2)
    assert_exactly_once(run, N_STEPS + 2)
    return errors


@pytest.mark.parametrize("step_s", [-86_400.0, -1.0, 86_400.0, 1e9])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, shim: Path, step_s: float) -> None:
    assert run_broken(shim, clock_steps, str(tmp_path), step_s) == []


def test_a_temporary_swept_by_a_host_whose_clock_is_ahead_is_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shard.h5"
    with pytest.raises(StorageError, match=rf"rename into place {path}: No such file"):
        write_durably(path, b"x", check=lambda _: assert_swept(tmp_path))
    assert list(tmp_path.iterdir()) == []


def assert_swept(folder: Path) -> None:
    assert sweep_temporaries(folder, older_than_s=-86_400) == 1


def late_names(folder: str, seconds: float, number: int) -> list[str]:
    """Publish here, read at once where neither names nor listings show anything new yet."""
    run = new_run(Path(folder) / "run")
    attempt(run, 2)
    ref = publish(run, [4, 5], 3, 0)
    errors = []
    actions: dict[str, Callable[[], object]] = {
        "verify": lambda: verify_shard(run, ref),
        "read": lambda: read_groups(run, ref, [4, 5]),
        "manifests": lambda: committed_manifests(run, 2),
        "gives up": lambda: verify_shard(run, ref, deadline_s=seconds / 4),
    }
    for name, action in actions.items():
        late_s = 3600.0 if name == "gives up" else seconds
        hide("-attempt_" if name == "manifests" else Path(ref.path).name, late_s, number)
        try:
            action()
        except ShardError as error:
            errors.append(f"{name}: {error}")
    return errors


def live_run(folder: str, n_steps: int) -> None:
    attempt(RunDir(Path(folder)), n_steps, keep_steps=2)


def test_an_audit_beside_a_live_run_finds_nothing(tmp_path: Path, shim: Path) -> None:
    run = new_run(tmp_path / "run", keep_steps=2)
    n_audits = 0
    with ThreadPoolExecutor() as pool:
        writer = pool.submit(run_broken, shim, live_run, str(run.root), 100)
        while not writer.done():
            assert verify_run(run) == []
            n_audits += 1
        writer.result()
    assert n_audits >= 10
    assert_exactly_once(run, 100)
    assert len(list_shards(run)) <= 4


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_names_and_listings_that_come_late_are_waited_for_up_to_a_deadline(
    tmp_path: Path, shim: Path, number: int
) -> None:
    (error,) = run_broken(shim, late_names, str(tmp_path), 0.4, number)
    assert error.startswith(f"gives up: read {tmp_path}/run/episodes/v000002-")
    assert re.search(rf"{os.strerror(number)}, still so after [\d.]+ s", error)
