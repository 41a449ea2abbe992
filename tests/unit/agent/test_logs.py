"""Logs are any bytes, and no piece of them is big."""

from pathlib import Path

import pytest

from agent.logs import (
    BACKLOG_BYTES,
    KEPT_BYTES,
    LEFT_ON_DISK_BYTES,
    ON_DISK_BYTES,
    TAIL_BYTES,
    Chunk,
    cap,
    next_chunk,
    tail,
)
from agent.wire import LogChunk


def shipped(path: Path, *, is_whole: bool = True) -> list[Chunk]:
    chunks: list[Chunk] = []
    while chunk := next_chunk(path, chunks[-1].end if chunks else 0, is_whole=is_whole):
        chunks.append(chunk)
    return chunks


def test_a_log_arrives_whole_in_order_of_its_offsets(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ünï😀\n" * 60_000)
    chunks = shipped(log)
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == log.read_text()
    assert [c.offset for c in chunks[1:]] == [c.end for c in chunks[:-1]]


def test_half_a_character_waits_for_its_other_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a\xf0\x9f")
    assert next_chunk(log, 0, is_whole=False) == Chunk(0, 1, "a")
    assert next_chunk(log, 1, is_whole=False) is None
    assert next_chunk(log, 1, is_whole=True) == Chunk(1, 3, "\ufffd")
    log.write_bytes("a😀".encode())
    assert next_chunk(log, 1, is_whole=False) == Chunk(1, 5, "😀")


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"ok \xff\xfe \x00 end")
    assert [chunk.text for chunk in shipped(log)] == ["ok \ufffd\ufffd \x00 end"]


def test_of_a_flood_the_middle_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(200 << 20)  # one line of 200 MB
    chunks = shipped(log)
    assert chunks[0].text == f"\n[… {(200 << 20) - KEPT_BYTES} bytes left out …]\n"
    assert chunks[-1].end == 200 << 20
    assert sum(len(chunk.text) for chunk in chunks) < KEPT_BYTES + 100 < BACKLOG_BYTES
    for chunk in chunks:
        LogChunk(
            incarnation="i", job="j", generation=1, rank=0, offset=chunk.offset, text=chunk.text
        )


@pytest.mark.parametrize("content", [b"", b"one\ntwo\n", b"\xff" * 3 * TAIL_BYTES])
def test_the_tail_is_short_text_whatever_is_there(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    assert tail(log) == content[-TAIL_BYTES:].decode(errors="replace")
    assert tail(tmp_path / "missing") == ""


def test_a_log_without_end_takes_a_bounded_room_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as program:
        for _ in range(10):
            program.write(b"x" * (ON_DISK_BYTES // 4))
            program.flush()
            cap(path)
            assert path.stat().st_blocks * 512 <= ON_DISK_BYTES + (1 << 20)
        program.write(b"the end\n")
    assert path.stat().st_size == 10 * (ON_DISK_BYTES // 4) + 8
    assert tail(path).endswith("xthe end\n")
    assert "\0" not in "".join(chunk.text for chunk in shipped(path))
    assert LEFT_ON_DISK_BYTES > BACKLOG_BYTES


def test_a_log_of_usual_length_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (ON_DISK_BYTES // 2))
    cap(path)
    assert b"\0" not in path.read_bytes()
