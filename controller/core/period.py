"""How often to save, where nobody has said it: from what a save costs and how often nodes are lost.
PURE.

Saving too seldom loses steps with each loss, too often costs time with each save. After Young and
Daly the best period is sqrt(2 x cost of a save x mean time between losses). The cost is how long
training stands still for it, as measured; the writing goes on beside it, so a period is never
shorter than twice that. The mean begins with a guess that counts as much as an hour's experience.
"""

import math
from dataclasses import dataclass

from controller.core.states import Reason
from controller.core.words import seconds as in_words
from controller.core.world import Job

UNMEASURED = 30.0
"""Seconds between saves while none was measured."""
SHORTEST, LONGEST = 5.0, 900.0
LEAST_COST = 0.01
"""Of a save: what it costs beside the standing still."""
EXPECTED_BETWEEN_LOSSES = 3600.0
"""Before any experience."""
MOVED = 0.25
"""A running generation is told when the period has moved by more."""


@dataclass(frozen=True)
class Period:
    """Seconds between saves, and the sentence that says why."""

    seconds: float
    because: str


def period_of(job: Job, now: float) -> Period | None:
    """The best period now; None: the user has said it."""
    if not job.spec.checkpoint.every.auto:
        return None
    if job.save_cost is None:
        because = f"Saving every {in_words(UNMEASURED)} until a save is measured."
        return Period(UNMEASURED, because)
    losses = sum(g.launched and g.reason is Reason.NODE_LOST for g in job.past)
    ran = max(0.0, now - job.trained_since) if job.trained_since else 0.0
    between = (ran + EXPECTED_BETWEEN_LOSSES) / (losses + 1)
    cost = max(LEAST_COST, job.save_cost.stall_seconds)
    shortest = max(SHORTEST, 2 * job.save_cost.write_seconds)
    best = min(max(math.sqrt(2 * cost * between), shortest), max(LONGEST, shortest))
    every = float(f"{best:.2g}") if best < 100 else round(best)
    because = (
        f"Saving every {in_words(every)}: the root of 2 × {cost:.2g} s a save"
        f" × {in_words(round(between))} between losses"
    )
    bound = " (bounded)" if best in (shortest, LONGEST) else ""
    return Period(every, f"{because}{bound}.")


def has_moved(was: float | None, to: float) -> bool:
    """Whether that is worth telling."""
    return was is None or abs(to - was) > MOVED * was
