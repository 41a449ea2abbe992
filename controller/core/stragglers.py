"""Nodes that are slow, so that a plan may spare them. PURE.

    fast --five windows slow--> slow --five windows as the others, at work------> fast
                                     --spare for long enough, to be tried again-> fast

Found out while a generation trains, and remembered with the node's incarnation until its newest
steps say otherwise. Who was left out takes no steps: it is tried again after ``slow_lapses``, twice
as long after each time that it was slow again. What a plan makes of it is
:func:`controller.core.assign.choice_for`'s affair.
"""

from collections.abc import Iterable, Iterator, Sequence

from controller.core.actions import MarkSlow
from controller.core.seating import is_slow
from controller.core.states import GenerationState
from controller.core.words import seconds
from controller.core.world import Generation, Job, Node, Rules, Slowness
from controller.planner.cutting import Model
from controller.planner.stragglers import Pace, paces_of

Name = tuple[str, str]
"""A node and its incarnation."""


def verdicts(
    nodes: Iterable[Node], jobs: Iterable[Job], now: float, rules: Rules
) -> Iterator[MarkSlow]:
    """Who of ``nodes`` is found to be slow, much slower or faster than before, or slow no more."""
    there = {(node.name, node.incarnation): node for node in nodes}
    working: set[Name] = set()
    for job in jobs:
        if job.current is not None and job.current.is_launched:
            working.update(job.current.nodes)
            factor = job.spec.health.slow_factor
            for name, paces in judged(job, job.current).items():
                if name in there and (mark := _mark(there[name], paces, factor, now)):
                    yield mark
    for name, node in there.items():
        if node.slow and is_slow(node) and name not in working:
            spared = now - node.slow.since
            if spared >= rules.slow_lapses * 2 ** min(node.slow.times - 1, 8):
                yield _over(node, now, f"{node.name} has been spared for {seconds(round(spared))}"
                                       " and may be tried again.")  # fmt: skip


def judged(job: Job, generation: Generation) -> dict[Name, list[Pace]]:
    """Of each node at work, how its ranks go, as far as they can be compared yet."""
    found: dict[Name, list[Pace]] = {}
    shape = generation.shape
    if shape is None or generation.kind != "train":
        return found
    if generation.state is not GenerationState.RUNNING:
        return found
    calibrated: tuple[float, ...] = ()
    if job.costs is not None and generation.cuts:
        times = Model(job.costs, shape.micro_batch).cut_at(generation.cuts).times
        calibrated = tuple(one.forward for one in times)
    paces = paces_of({seat.rank: seat.paces for seat in generation.seats}, shape, calibrated)
    for rank, pace in paces.items():
        seat = generation.seats[rank]
        found.setdefault((seat.node, seat.incarnation), []).append(pace)
    return found


def _mark(node: Node, paces: Sequence[Pace], slow_factor: float, now: float) -> MarkSlow | None:
    slowest = max(paces, key=lambda pace: pace.least)
    known = node.slow if is_slow(node) else None
    if known is None:
        if not slowest.is_slow(slow_factor):
            return None
        times = node.slow.times + 1 if node.slow else 1
        return _slow(node, slowest, since=now, times=times)
    if all(pace.is_as_others(slow_factor) for pace in paces):
        return _over(node, now, f"{node.name} is as fast as the others again.")
    moved = slowest.least > known.factor * slow_factor or slowest.most < known.factor / slow_factor
    if slowest.is_slow(slow_factor) and moved:
        return _slow(node, slowest, since=known.since, times=known.times)
    return None


def _slow(node: Node, pace: Pace, *, since: float, times: int) -> MarkSlow:
    factor = round(pace.usual, 2)
    because = f"{node.name} is slow: {factor:.2f}× what its stage usually takes."
    return MarkSlow(node.name, node.incarnation, Slowness(factor, since, times), because)


def _over(node: Node, now: float, because: str) -> MarkSlow:
    assert node.slow is not None
    was = Slowness(node.slow.factor, node.slow.since, node.slow.times, over_at=now)
    return MarkSlow(node.name, node.incarnation, was, because)
