"""A trainer's log as text: its tail, and the chunks in which it is shipped.

A log is what a user's program wrote: any bytes, any amount. No call here reads more than a chunk,
and of what was written faster than it can be shipped the middle is left out, and said so. On disk
too a log has a bound: the room of its beginning is given back.
"""

import codecs
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TAIL_BYTES = 4096
CHUNK_BYTES = 128 << 10
"""As text it is never longer than the wire allows."""
BACKLOG_BYTES = 4 << 20
"""When more than this waits to be shipped …"""
KEPT_BYTES = 1 << 20
"""… only so much of its end is."""
ON_DISK_BYTES = 64 << 20
"""When a log takes more room than this …"""
LEFT_ON_DISK_BYTES = 16 << 20
"""… only its end does; more than what may still be shipped."""

_PUNCH_HOLE_KEEP_SIZE = 0x03
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Chunk:
    """The text of a log from byte ``offset`` up to ``end``; invalid UTF-8 is replaced."""

    offset: int
    end: int
    text: str


def next_chunk(path: Path, offset: int, *, is_whole: bool) -> Chunk | None:
    """What stands in the log from ``offset`` on, a bounded piece of it; None when nothing new does.

    ``is_whole``: nothing more will be written, so that half a character at the end is taken too.
    """
    try:
        with path.open("rb") as file:
            waiting = os.fstat(file.fileno()).st_size - offset
            if waiting > BACKLOG_BYTES:
                skipped = waiting - KEPT_BYTES
                return Chunk(offset, offset + skipped, f"\n[… {skipped} bytes left out …]\n")
            return _read(file, offset, is_whole and waiting <= CHUNK_BYTES)
    except OSError:
        return None


def _read(file: BinaryIO, offset: int, is_last: bool) -> Chunk | None:
    file.seek(offset)
    found = file.read(CHUNK_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(found, final=is_last)
    kept_back, _ = decoder.getstate()
    return Chunk(offset, offset + len(found) - len(kept_back), text) if text else None


def tail(path: Path) -> str:
    """The last lines of a log, at most 4 kB; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def cap(path: Path) -> None:
    """Give back the room of the beginning of a log that takes too much; it then reads as zeros, and
    no offset changes, for whoever still writes it. Where a file system cannot, nothing happens.
    """
    try:
        with path.open("r+b") as file:
            state = os.fstat(file.fileno())
            if state.st_blocks * 512 > ON_DISK_BYTES:
                length = ctypes.c_int64(state.st_size - LEFT_ON_DISK_BYTES)
                _LIBC.fallocate(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), length)
    except OSError:
        return
