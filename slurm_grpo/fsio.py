"""Durable files on a shared file system: whole or absent under any name, and errors that say which
file and operation.

Shards, manifests, the frozen config and every other small file of a run go through here. Knows
nothing of what the bytes mean. Three rules carry it: a name appears only once its bytes are on the
disk; a name that must not change is made with `link()`, which refuses to overwrite; and a reader
forgives what NFS does to a fresh name (ENOENT, ESTALE, a short file) up to a deadline, and nothing
else.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from slurm_grpo.errors import ShardError, StorageError

T = TypeVar("T")

READ_DEADLINE_S = 30.0
TEMPORARY_AGE_S = 3600.0
"""No write takes this long: an older temporary belongs to a writer that was killed."""

_TRANSIENT = (errno.ENOENT, errno.ESTALE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


class ShortRead(OSError):
    """The file is smaller than it was announced; on NFS that may be a view of the past."""


@contextmanager
def storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names `operation` and `path`."""
    try:
        yield
    except OSError as error:
        advice = "Check the file system that holds it"
        if error.errno in _FULL:
            advice = "The disk, the quota or a file size limit is full: free space and resume"
        elif error.errno in _DENIED:
            advice = "This user may not write there: check its permissions and how it is mounted"
        reason = error.strerror or str(error)
        raise StorageError(f"{operation} {path}: {reason}. {advice}.") from error


def write_durably(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    check: Callable[[Path], None] = lambda temporary: None,
) -> None:
    """Make `path` hold `data`, replacing what it held; after a crash it holds the old bytes or the
    new, never a mix.

    Returns once file and directory are on the disk. `check` gets the synced file before it gets its
    name; if it raises, `path` stays as it was. Raises StorageError.
    """
    with synced_temporary(path, data, mode) as temporary:
        check(temporary)
        put_in_place(temporary, path)


@contextmanager
def synced_temporary(path: Path, data: bytes, mode: int = 0o644) -> Iterator[Path]:
    """A synced file next to `path` that holds `data`; gone after the block unless renamed. Raises
    StorageError naming `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with storage_errors("create temporary for", path):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        _fill(fd, path, data)
        yield temporary
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a synced file its name, durably, replacing what had it. Raises StorageError."""
    with storage_errors("rename into place", path):
        os.rename(temporary, path)
    sync_directory(path.parent)


def link_durably(path: Path, data: bytes) -> bool:
    """Make `path` hold `data` unless it exists; False if it exists with other bytes.

    Existing with the same bytes is success: an NFS client that repeats a lost request is answered
    EEXIST for its own link. Raises StorageError.
    """
    with synced_temporary(path, data) as temporary:
        with storage_errors("link into place", path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                if read_whole(path) != data:
                    return False
        sync_directory(path.parent)
        return True


def read_whole(
    path: Path, size_bytes: int | None = None, *, deadline_s: float = READ_DEADLINE_S
) -> bytes:
    """Return the bytes of `path`, waiting for a fresh name to show up with all its `size_bytes`.

    Raises ShardError when the file is still missing or short after `deadline_s`, StorageError on
    other refusals.
    """

    def read() -> bytes:
        data = path.read_bytes()
        if size_bytes is not None and len(data) < size_bytes:
            raise ShortRead(f"has {len(data)} of {size_bytes} bytes")
        return data

    return retry_transient(read, path, deadline_s)


def retry_transient(action: Callable[[], T], path: Path, deadline_s: float) -> T:
    """Repeat `action`, with back-off, while it fails as a fresh name on NFS may: ENOENT, ESTALE,
    ShortRead.

    Raises ShardError once `deadline_s` has passed, StorageError at once for any other errno.
    """
    start, pause_s = time.monotonic(), 0.01
    while True:
        try:
            return action()
        except OSError as error:
            if not isinstance(error, ShortRead) and error.errno not in _TRANSIENT:
                raise StorageError(f"read {path}: {error.strerror or error}.") from error
            waited_s = time.monotonic() - start
            if waited_s >= deadline_s:
                raise ShardError(
                    f"read {path}: {error.strerror or error}, still so after {waited_s:.1f} s."
                ) from error
            time.sleep(min(pause_s, deadline_s - waited_s))
            pause_s = min(pause_s * 2, 1.0)


def sync_directory(directory: Path) -> None:
    """Put the names in `directory` on the disk."""
    with storage_errors("fsync directory", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no directory fsync
                raise
        finally:
            os.close(fd)


def sweep_temporaries(directory: Path, *, older_than_s: float = TEMPORARY_AGE_S) -> int:
    """Remove temporaries that killed writers left in `directory`; return how many."""
    n_removed = 0
    with storage_errors("list", directory), os.scandir(directory) as entries:
        candidates = [e for e in entries if TEMPORARY_NAME.fullmatch(e.name)]
    for entry in candidates:
        with storage_errors("remove old temporary", Path(entry.path)):
            try:
                if time.time() - entry.stat().st_mtime > older_than_s:
                    os.unlink(entry.path)
                    n_removed += 1
            except FileNotFoundError:
                continue  # its writer has just finished
    return n_removed


def _fill(fd: int, path: Path, data: bytes) -> None:
    """Write, sync and close `fd`. The close is checked too: NFS and quotas report there."""
    try:
        view = memoryview(data)
        with storage_errors("write", path):
            while view:
                view = view[os.write(fd, view) :]
        with storage_errors("fsync", path):
            os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    with storage_errors("close", path):
        os.close(fd)
