"""Where a recovery's seconds went, as pieces of a bar. PURE."""

from collections.abc import Iterator
from dataclasses import dataclass

from controller.api.schemas import RecoveryPhases, RecoveryView

PHASES = tuple(RecoveryPhases.model_fields)
WIDTH = 1000.0
"""Of the longest recovery's bar; the others are to the same scale."""


@dataclass(frozen=True)
class Segment:
    """One phase: from ``x`` on, ``width`` wide."""

    phase: str
    seconds: float
    x: float
    width: float


def segments(view: RecoveryView, longest: float) -> Iterator[Segment]:
    """The phases that took time, side by side, where ``longest`` seconds fill the whole width."""
    x = 0.0
    for phase in PHASES:
        seconds: float | None = getattr(view.phases, phase)
        if seconds and longest > 0:
            width = WIDTH * seconds / longest
            yield Segment(phase, seconds, x, width)
            x += width
