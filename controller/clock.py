"""The controller's one clock: wall seconds at the process's start plus monotonic seconds since.

So times of one run never go backward when somebody sets the wall clock, and still compare with
those that an earlier run has stored. No agent's clock is ever asked.
"""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What is asked for the time; tests have their own."""

    def now(self) -> float:
        """Seconds since 1970, never going backward within a process."""
        ...


class SystemClock:
    """The real one."""

    def __init__(self) -> None:
        self._origin = time.time() - time.monotonic()

    def now(self) -> float:
        """Wall seconds at the start plus monotonic seconds since."""
        return self._origin + time.monotonic()


def moment(seconds: float) -> datetime:
    """A stored time as people and JSON want it: aware, UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def moment_or_none(seconds: float | None) -> datetime | None:
    """The same for what has perhaps not happened yet (None or 0)."""
    return moment(seconds) if seconds else None
