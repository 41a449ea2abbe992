"""A trainer's log as text: its tail, and the chunks in which it is shipped.

A log is what a user's program wrote: any bytes, any amount. No call here reads more than a chunk,
and of what was written faster than it can be shipped the middle is left out, and said so.
"""

import codecs
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
