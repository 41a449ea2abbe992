"""Files that are there whole or not at all, and stay: written aside, fsynced, then renamed."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write ``path`` durably. Raises OSError (a full disk, say); then nothing of it is left."""
    temporary = temporary_name(path)
    try:
        write_synced(temporary, chunks)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Where this process writes ``path`` before it is whole; beside it, so that rename works."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write ``chunks`` to ``path`` and wait until they are on the disk."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some mounts of object stores know no fsync of a folder; there a name is durable at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
