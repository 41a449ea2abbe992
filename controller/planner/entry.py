"""A shape on its way to be played, or not: how it is cut, what it may take at least, what it takes.
PURE.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.planner.bound import steady_seconds
from controller.planner.cutting import Cutting
from controller.planner.pipeline import Pipeline
from controller.planner.place import place
from controller.planner.problem import Problem
from controller.planner.simulate import play
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat

Paces = tuple[tuple[float, ...], ...]
"""By replica and stage, how many times as long its device takes; of like replicas one. Empty: none
is slow.
"""
_MOST_PLAYED = 12_000
"""Micro-batches x stages of a play: a fifth of a second. Measured: what is added to longer ones
errs by 0.5 % in the median, 4 % at worst.
"""


@dataclass
class Entry:
    """One shape, seated in one way."""

    devices: int
    """It needs so many."""
    shape: Shape
    cutting: Cutting
    pipeline: Pipeline
    """A replica's whose devices are not slow."""
    micro_batches: int
    in_flight: tuple[int, ...]
    bound: float
    paces: Paces = ()
    step_seconds: float = 0.0
    """0: not played yet."""
    bubble: float = 0.0

    def play(self, problem: Problem) -> None:
        """Find out what a step takes; all replicas wait for the slowest."""
        if self.step_seconds:
            return
        slowed = [self.pipeline.slowed(factors) for factors in self.paces]
        played = [self._played(one, problem) for one in slowed or [self.pipeline]]
        self.step_seconds, self.bubble = max(played)

    def _played(self, pipeline: Pipeline, problem: Problem) -> tuple[float, float]:
        """A long one only until the pipeline has long been full; from there on it is steady."""
        depth, count = self.shape.depth, self.micro_batches
        played = min(count, max(depth, _MOST_PLAYED // depth))
        last = problem.last_size(self.shape.replicas) if played == count else 1.0
        caps = [min(cap, played) for cap in self.in_flight]
        run = play(pipeline, problem.schedule, played, in_flight=caps, last=last)
        more = (count - played) * steady_seconds(pipeline, self.in_flight)
        return run.step_seconds + more, run.bubble


def paces_by_rank(shape: Shape, factors: Sequence[float]) -> Paces:
    """``factors``: by rank, how many times as long its device takes."""
    if max(factors) == min(factors) == 1.0:
        return ()
    paces = [[1.0] * shape.depth for _ in range(shape.replicas)]
    for rank, factor in enumerate(factors):
        seat = Seat.of(rank, shape)
        paces[seat.replica][seat.stage] = factor
    return tuple(sorted(set(map(tuple, paces))))


def paces_by_node(shape: Shape, devices: Sequence[int], factors: Sequence[float]) -> Paces:
    """As seated on nodes of so many ``devices`` each, of which node i takes ``factors[i]`` times as
    long.
    """
    spots = place(shape.depth, shape.replicas, devices)
    return paces_by_rank(shape, [factors[node] for node, _ in spots])
