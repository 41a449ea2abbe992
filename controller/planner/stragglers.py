"""Who is slow: a rank whose forwards take longer than they do on its stage's other replicas. PURE.

A window is a few steps; the first step, which warms up, is in none. A rank is slow when in each of
its newest windows its mean forward was more than ``slow_factor`` times the median of the other
replicas'. Where there is no other replica, times the median over all ranks of what they take of
their calibrated seconds: a load that weighs on all alike makes nobody slow.

Source: the public scripts of Varuna (there: 15 % over the median).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainer.contract.progress import WINDOWS, Paced
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat


@dataclass(frozen=True)
class Slow:
    """``factor``: times what the others take, in the window in which it was least."""

    rank: int
    factor: float


def slow_ranks(
    paces: Mapping[int, Sequence[Paced]],
    shape: Shape,
    slow_factor: float,
    calibrated: Sequence[float] = (),
) -> list[Slow]:
    """The slowest first. ``paces``: by rank, its newest windows; ``calibrated``: per stage, the
    seconds of a forward; empty: not known.
    """
    known = {rank: tuple(one)[-WINDOWS:] for rank, one in paces.items() if len(one) >= WINDOWS}
    found = []
    for rank in known:
        factors = [_factor(rank, known, shape, calibrated, at) for at in range(WINDOWS)]
        least = min((one for one in factors if one is not None), default=0.0)
        if None not in factors and least > slow_factor:
            found.append(Slow(rank, least))
    return sorted(found, key=lambda slow: (-slow.factor, slow.rank))


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
