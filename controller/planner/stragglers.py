"""Who is slow: a rank whose forwards take longer than they do on its stage's other replicas. PURE.

A window is a few steps; the first step, which warms up, is in none. A rank is slow when in each of
its newest windows its mean forward was more than ``slow_factor`` times the median of the other
replicas', and as fast as the others when in none it was half as much more. Where there is no other
replica, times the median over all ranks of what they take of their calibrated seconds: a load that
weighs on all alike makes nobody slow.

Source: the public scripts of Varuna (there: 15 % over the median).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainer.contract.progress import WINDOWS, Paced
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat


@dataclass(frozen=True)
class Pace:
    """Times what the others take: in the window in which it was least, usually, at most."""

    least: float
    usual: float
    most: float

    def is_slow(self, slow_factor: float) -> bool:
        """In every window."""
        return self.least > slow_factor

    def is_as_others(self, slow_factor: float) -> bool:
        """In every window, and by a margin: who is about as slow as is allowed is neither."""
        return self.most < (1 + slow_factor) / 2


def paces_of(
    windows: Mapping[int, Sequence[Paced]], shape: Shape, calibrated: Sequence[float] = ()
) -> dict[int, Pace]:
    """By rank; of those that can be compared. ``windows``: by rank, its newest ones;
    ``calibrated``: per stage, the seconds of a forward; empty: not known.
    """
    known = {rank: tuple(one)[-WINDOWS:] for rank, one in windows.items() if len(one) >= WINDOWS}
    found = {}
    for rank in known:
        factors = [_factor(rank, known, shape, calibrated, at) for at in range(WINDOWS)]
        there = [factor for factor in factors if factor is not None]
        if len(there) == WINDOWS:
            found[rank] = Pace(min(there), median(there), max(there))
    return found


def _factor(
    rank: int,
    known: Mapping[int, Sequence[Paced]],
    shape: Shape,
    calibrated: Sequence[float],
    window: int,
) -> float | None:
    mine = known[rank][window].forward_seconds
    stage = Seat.of(rank, shape).stage
    if shape.replicas > 1:
        others = [
            one[window].forward_seconds
            for other, one in known.items()
            if other != rank and Seat.of(other, shape).stage == stage
        ]
        usual = median(others) if others else 0.0
        return mine / usual if usual else None
    if not calibrated or not calibrated[stage] or len(known) < 2:
        return None
    levels = [
        one[window].forward_seconds / calibrated[Seat.of(other, shape).stage]
        for other, one in known.items()
        if other != rank and calibrated[Seat.of(other, shape).stage]
    ]
    usual = median(levels) if levels else 0.0
    return mine / calibrated[stage] / usual if usual else None
