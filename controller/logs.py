"""The trainers' logs as files: ``<data>/logs/<job>/g<generation>/rank-<rank>.log``.

A log grows to half its cap, then becomes ``.old`` (the one before goes) and a new one begins with a
line that says so: so at most the cap is kept, the newest. Offsets are of the whole log, dropped
bytes counted. A tail seeks; nothing reads a whole file. A small state file beside each log holds
where its last chunk began, so that a chunk that is sent again replaces itself.
"""

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_READ = 1 << 20
_NOTICE = "[varuna] This log is larger than {cap} MB; older lines were dropped.\n"


@dataclass(frozen=True)
class LogPiece:
    """Bytes ``offset`` .. ``next_offset`` - 1 of a log, decoded."""

    offset: int
    next_offset: int
    text: str

    def up_to(self, end: str) -> tuple["LogPiece", bool]:
        """The piece until ``end``, which is taken too, and whether it is there."""
        text, found, _ = self.text.partition(end)
        text += found
        left_out = len(self.text.encode()) - len(text.encode())
        return LogPiece(self.offset, self.next_offset - left_out, text), bool(found)


@dataclass
class _State:
    sent_from: int = -1
    """The agent's offset of the last chunk."""
    began: int = 0
    """Our offset at which that was written."""
    old: int = 0
    """Our offset of the first byte of ``.old``."""
    start: int = 0
    """Our offset of the first byte of ``.log``."""


class Logs:
    """All logs below ``folder``."""

    def __init__(self, folder: Path, cap_bytes: int) -> None:
        self._folder = folder
        self._cap = cap_bytes
        self._lock = threading.Lock()

    def append(self, job: str, generation: int, rank: int, sent_from: int, text: str) -> None:
        """Add a chunk that began at the agent's offset ``sent_from``; the same again replaces it,
        an older one is known.
        """
        path = self._path(job, generation, rank)
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = _load(path)
            if sent_from < state.sent_from:
                return
            if sent_from == state.sent_from:
                _cut(path, state.began - state.start)
            elif _size(path) >= self._cap // 2:
                self._turn_over(path, state)
            state.sent_from, state.began = sent_from, state.start + _size(path)
            _keep(path, state)
            with path.open("ab") as file:
                file.write(text.encode("utf-8", "replace"))

    def _turn_over(self, path: Path, state: _State) -> None:
        size = _size(path)
        os.replace(path, _old(path))
        state.old, state.start = state.start, state.start + size
        path.write_text(_NOTICE.format(cap=self._cap >> 20))

    def tail(self, job: str, generation: int, rank: int, lines: int) -> LogPiece:
        """The last ``lines`` lines, at most :data:`MAX_READ` bytes of them."""
        path = self._path(job, generation, rank)
        with self._lock:
            end = _load(path).start + _size(path)
            text = self._read(path, max(0, end - MAX_READ), end)
        at = len(text)
        if text.endswith(b"\n"):
            at -= 1
        for _ in range(lines):
            at = text.rfind(b"\n", 0, at)
            if at < 0:
                break
        kept = text[at + 1 :] if lines > 0 else b""
        return LogPiece(end - len(kept), end, kept.decode("utf-8", "replace"))

    def read(self, job: str, generation: int, rank: int, offset: int) -> LogPiece:
        """From ``offset`` on, at most :data:`MAX_READ` bytes, ending between characters."""
        path = self._path(job, generation, rank)
        with self._lock:
            state = _load(path)
            end = state.start + _size(path)
            begin = min(max(offset, state.old), end)
            text = self._read(path, begin, min(end, begin + MAX_READ))
        whole = text.decode("utf-8", "ignore") if begin + len(text) < end else None
        if whole is not None:
            text = whole.encode()
        return LogPiece(begin, begin + len(text), text.decode("utf-8", "replace"))

    def begins(self, job: str, generation: int, rank: int, text: str) -> bool:
        """Whether the log's first words are these."""
        wanted = text.encode()
        with self._lock:
            path = self._path(job, generation, rank)
            return self._read(path, 0, len(wanted)) == wanted

    def _read(self, path: Path, begin: int, end: int) -> bytes:
        state = _load(path)
        pieces = b""
        for file, start in ((_old(path), state.old), (path, state.start)):
            if not file.exists():
                continue
            first, last = max(begin, start), min(end, start + _size(file))
            if first < last:
                with file.open("rb") as opened:
                    opened.seek(first - start)
                    pieces += opened.read(last - first)
        return pieces

    def _path(self, job: str, generation: int, rank: int) -> Path:
        return self._folder / job / f"g{generation}" / f"rank-{rank}.log"


def _old(path: Path) -> Path:
    return path.with_suffix(".old")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut(path: Path, size: int) -> None:
    if path.exists():
        os.truncate(path, size)


def _load(path: Path) -> _State:
    try:
        return _State(**json.loads(path.with_suffix(".json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return _State()


def _keep(path: Path, state: _State) -> None:
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(asdict(state)))
    os.replace(temporary, path.with_suffix(".json"))
