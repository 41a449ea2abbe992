"""Nodes that are slow, so that a plan may spare them. PURE.

Found out while a generation runs, one stops it (reason ``straggler``); the launches after it go by
the same windows, read again from the generation that ended so. A node that comes back as a new
incarnation begins anew, and a verdict lapses.
"""

from collections.abc import Mapping, Sequence

from controller.core.states import Reason
from controller.core.world import EndedGeneration, Generation, Job, Rules
from controller.planner.cutting import Model
from controller.planner.stragglers import slow_ranks
from trainer.contract.progress import Paced
from trainer.contract.spec import Shape

Name = tuple[str, str]
"""A node and its incarnation."""


def slow_now(job: Job, generation: Generation) -> dict[Name, float]:
    """Who of those at work is slow, and by what factor."""
    if generation.shape is None:
        return {}
    seated = [(seat.node, seat.incarnation) for seat in generation.seats]
    paces = {seat.rank: seat.paces for seat in generation.seats}
    return _slow(job, generation.shape, generation.cuts, seated, paces)


def slow_before(job: Job, now: float, rules: Rules) -> dict[Name, float]:
    """Who was found to be, not too long ago."""
    found: dict[Name, float] = {}
    for g in job.past:
        if g.reason is Reason.STRAGGLER and g.shape and now < g.ended_at + rules.slow_lapses:
            found |= _of_ended(job, g, g.shape)
    return found


def _of_ended(job: Job, g: EndedGeneration, shape: Shape) -> dict[Name, float]:
    return _slow(job, shape, g.cuts, g.seated, dict(enumerate(g.paces)))


def _slow(
    job: Job,
    shape: Shape,
    cuts: tuple[int, ...],
    seated: Sequence[Name],
    paces: Mapping[int, Sequence[Paced]],
) -> dict[Name, float]:
    calibrated: tuple[float, ...] = ()
    if job.costs is not None and cuts:
        times = Model(job.costs, shape.micro_batch).cut_at(cuts).times
        calibrated = tuple(one.forward for one in times)
    found: dict[Name, float] = {}
    for slow in slow_ranks(paces, shape, job.spec.health.slow_factor, calibrated):
        found.setdefault(seated[slow.rank], slow.factor)
    return found
