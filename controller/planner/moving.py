"""Move to another shape, or stay? PURE.

A move is worth it when a step becomes enough faster, and when what it saves until the next loss (or
the end) is more than what the move itself takes.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Stay:
    """Why not to move; a sentence's second half."""

    because: str


@dataclass(frozen=True)
class Move:
    """``gain``: the part of a step's time that is saved."""

    gain: float


@dataclass(frozen=True)
class Losses:
    """What has been seen of losses that stopped the job."""

    count: int = 0
    watched_seconds: float = 0.0

    @property
    def expected_seconds(self) -> float:
        """Until the next one, if it goes on as it has; infinite while none was seen."""
        return self.watched_seconds / self.count if self.count else inf


def weigh(
    now_seconds: float,
    then_seconds: float,
    *,
    min_gain: float,
    move_seconds: float,
    seconds_left: float,
    losses: Losses,
) -> Move | Stay:
    """A step takes ``now_seconds``, and would take ``then_seconds``; by today's pace the job ends
    in ``seconds_left``.
    """
    gain = 1 - then_seconds / now_seconds if now_seconds > 0 else 0.0
    if gain < min_gain or gain <= 0:
        return Stay(f"moving would gain {gain:.0%}, below the {min_gain:.0%} limit")
    horizon = min(seconds_left, losses.expected_seconds)
    if gain * horizon <= move_seconds:
        until = "the end" if seconds_left <= losses.expected_seconds else "the next loss"
        saved = f"moving would save {gain * horizon:,.1f} s until {until}"
        return Stay(f"{saved} and take {move_seconds:,.1f} s")
    return Move(gain)
