"""Ending or freezing a node's processes all at once, as a VM goes."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import psutil

T = TypeVar("T")


def tree(roots: Iterable[int]) -> list[int]:
    """The processes ``roots`` and all their descendants."""
    found: list[int] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            found += [root, *(child.pid for child in process.children(recursive=True))]
    return list(dict.fromkeys(found))


def strike(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> float:
    """Signal them in one breath; when that began (monotonic)."""
    began = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return began


def until(look: Callable[[], T | None], what: str, seconds: float, pause: float = 0.02) -> T:
    """Look until there is something. Raises TimeoutError with ``what`` was waited for."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause)
    return found
