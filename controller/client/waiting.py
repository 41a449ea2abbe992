"""Waiting for what another process does: look, pause, look again."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_SECONDS = 0.05


def until(look: Callable[[], T | None], seconds: float) -> T | None:
    """What ``look`` finds, as soon as that is something; None when it was nothing for ``seconds``.
    It looks once at least.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PAUSE_SECONDS)
    return found
