"""A step can take no less: sound bounds that need no simulation. PURE.

For each stage s of a pipeline that plays N micro-batches with at most c in flight there

    what comes first     its first input passes the stages above:          fill  = sum (F + hop)
    what comes last      its last gradient passes them upwards:            tail  = sum (B + hop)
    work                 it runs N times F, R and B:                       N (F + R + B)
    flight               each micro-batch is in flight for a way down and up again, c at a time
    the hop below        carries N messages one after the other, or 4 at a time

A plan whose bound is no better than a played plan's seconds need not be played.
"""

from collections.abc import Sequence

from controller.planner.pipeline import Pipeline
from trainer.contract.schedule import OUTSTANDING

_CAUTION = 1 - 1e-9
"""Sums of floats in another order than the simulator's."""


def least_seconds(
    pipeline: Pipeline, micro_batches: int, last: float, in_flight: Sequence[int]
) -> float:
    """No play of ``pipeline`` without jitter has fewer ``step_seconds``.

    ``last``: the size of the last micro-batch, in full ones.
    """
    stages, reduce = pipeline.stages, pipeline.reduce or (0.0,) * len(pipeline.stages)
    full, worked = micro_batches - 1, micro_batches - 1 + last
    ways, fill, tail, best = _ways(pipeline), 0.0, 0.0, 0.0
    for stage, times in enumerate(stages):
        works, flies = worked * times.each, full * ways / in_flight[stage]
        begins, ends = fill, max(reduce[stage], tail + reduce[0])
        if stage < len(pipeline.hops):
            hop = pipeline.hops[stage]
            sent = hop.seconds
            carries = times.forward * last + full * max(hop.busy, sent / OUTSTANDING)
            if carries > works:
                works = carries
            fill += times.forward * last + sent
            tail += times.backward * last + sent
            ways -= times.forward + times.backward + 2 * sent
        least = begins + (works if works > flies else flies) + ends
        if least > best:
            best = least
    return best * _CAUTION + pipeline.after


def steady_seconds(pipeline: Pipeline, in_flight: Sequence[int]) -> float:
    """What each further micro-batch adds, once the pipeline is full, by the same bounds."""
    ways, best = _ways(pipeline), 0.0
    for stage, times in enumerate(pipeline.stages):
        best = max(best, times.each, ways / in_flight[stage])
        if stage < len(pipeline.hops):
            hop = pipeline.hops[stage]
            best = max(best, hop.busy, hop.seconds / OUTSTANDING)
            ways -= times.forward + times.backward + 2 * hop.seconds
    return best


def _ways(pipeline: Pipeline) -> float:
    """A micro-batch's way down and up again, when nothing else is there."""
    work = sum(times.forward + times.backward for times in pipeline.stages)
    return work + 2 * sum(hop.seconds for hop in pipeline.hops)
