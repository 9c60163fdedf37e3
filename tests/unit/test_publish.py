"""The durable file protocol, and what publishing says when the file system refuses."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sample_episodes import assert_same_groups, make_group, make_header, make_run
from slurm_grpo.errors import ShardError, StorageError
from slurm_grpo.fsio import (
    ShortRead,
    link_durably,
    read_whole,
    retry_transient,
    sweep_temporaries,
    write_durably,
)
from slurm_grpo.staging.shards import publish_groups, read_groups


def test_writing_replaces_the_old_bytes_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_durably(path, b"old")
    write_durably(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_linking_keeps_the_first_bytes_and_accepts_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    assert link_durably(path, b"first")
    assert link_durably(path, b"first")
    assert not link_durably(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["manifest"]


def test_a_missing_directory_is_an_error_that_names_file_and_operation(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"create temporary for .*/gone/x: No such file"):
        write_durably(tmp_path / "gone" / "x", b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_publishing_works_once_there_is_room(small_disk: Path) -> None:
    run = make_run(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(100 * 1024))
    groups = [make_group(i) for i in range(4)]
    with pytest.raises(StorageError, match=r"write .*/episodes/e000-s.*No space left.*free space"):
        publish_groups(run, groups, make_header())
    assert list(run.episodes.iterdir()) == []
    ballast.unlink()
    ref = publish_groups(run, groups, make_header())
    assert_same_groups(read_groups(run, ref, range(4)), groups)


def test_a_short_write_is_continued_until_the_limit_says_no(tmp_path: Path) -> None:
    """Past the file size limit the kernel first writes a part, then refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=rf"write {tmp_path}/x: File too large\. The disk"):
            write_durably(tmp_path / "x", bytes((1 << 20) + 1))
        write_durably(tmp_path / "y", bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["y"]


def test_an_error_that_only_close_reports_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_close = os.close
    failed: list[int] = []

    def close(fd: int) -> None:
        real_close(fd)
        if not failed:
            failed.append(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageError, match=r"close .*/x: Disk quota exceeded"):
        write_durably(tmp_path / "x", b"data")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may write anywhere, so for a while it is not root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.fixture
def read_only_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run = make_run(root)
        root.chmod(0o755)
        run.episodes.chmod(0o555)
        yield root
        run.episodes.chmod(0o755)


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_directory_is_named(read_only_root: Path) -> None:
    with pytest.raises(StorageError, match=r"create temporary for .*/episodes/e000-s.*permissions"):
        publish_groups(make_run(read_only_root), [make_group(0)], make_header())


def test_reading_waits_for_a_fresh_name_to_show_all_its_bytes(tmp_path: Path) -> None:
    answers: list[bytes | OSError] = [
        OSError(errno.ENOENT, "not yet"),
        OSError(errno.ESTALE, "stale"),
        ShortRead("has 1 of 2 bytes"),
        b"ok",
    ]

    def read() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert retry_transient(read, tmp_path, deadline_s=60.0) == b"ok"
    assert answers == []


def test_reading_gives_up_at_the_deadline_but_at_once_on_other_errors(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ShardError, match=r"read .*/x: No such file.*still so after [\d.]+ s"):
        read_whole(tmp_path / "x", 3, deadline_s=0.1)
    (tmp_path / "x").write_bytes(b"ab")
    with pytest.raises(ShardError, match="has 2 of 3 bytes, still so"):
        read_whole(tmp_path / "x", 3, deadline_s=0.1)
    with pytest.raises(StorageError, match=rf"read {tmp_path}: Is a directory"):
        read_whole(tmp_path, deadline_s=60.0)
    assert time.monotonic() - started < 30.0


def test_the_sweep_removes_old_temporaries_and_nothing_else(tmp_path: Path) -> None:
    old = tmp_path / ".shard.h5.0123456789abcdef.tmp"
    young = tmp_path / ".shard.h5.fedcba9876543210.tmp"
    others = [tmp_path / name for name in ("shard.h5", ".hidden", "notes.tmp", ".x.tmp")]
    for path in (old, young, *others):
        path.touch()
    hour_ago = time.time() - 3601
    for path in (old, *others):
        os.utime(path, (hour_ago, hour_ago))
    assert sweep_temporaries(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted([young, *others])
