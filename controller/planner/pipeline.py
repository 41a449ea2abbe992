"""One pipeline as it is played: what each stage's tasks and each message take. PURE.

Seconds for one full micro-batch, no matter where they come from: a cut of measured layers
(:mod:`controller.planner.cutting`) or a file of stages (:mod:`controller.planner.stagefile`).
Chance is keyed by what it happens to, so the same micro-batch on the same stage has the same luck
under every schedule, and a seed gives the same numbers on every machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from statistics import NormalDist
from typing import Literal

from trainer.contract.costs import Scatter
from trainer.contract.schedule import Kind
from trainer.contract.spec import ScheduleName

Played = ScheduleName | Literal["varuna-static"]
"""A trainer's schedule, or ``varuna`` without its deviation: the static order, each recompute in
its place.
"""

_LEVELS = 1024


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's tasks on one micro-batch."""

    forward: float
    recompute: float
    backward: float
    is_last: bool = False

    @cached_property
    def each(self) -> float:
        """All that it does for one micro-batch; the last stage never recomputes."""
        return self.forward + self.backward + (0.0 if self.is_last else self.recompute)


@dataclass(frozen=True)
class Hop:
    """Between two stages, either way: a message occupies the link for ``busy`` seconds and arrives
    ``latency`` later.
    """

    latency: float
    busy: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """One message on an idle link."""
        return self.latency + self.busy


@dataclass(frozen=True)
class Jitter:
    """How single times scatter around their mean."""

    compute: tuple[float, ...] = (1.0,)
    """Equally likely factors on a task, in rising order, their mean 1."""
    link: float = 0.0
    """Mean of an exponential delay on each message, as a part of what it takes on an idle link."""

    @classmethod
    def of(cls, compute_cv: float, link: float = 0.0) -> "Jitter":
        """Normal factors with that coefficient of variation, cut off at a tenth."""
        if not compute_cv:
            return cls(link=link)
        spread = NormalDist(1.0, compute_cv)
        levels = [max(0.1, spread.inv_cdf((i + 0.5) / _LEVELS)) for i in range(_LEVELS)]
        mean = sum(levels) / _LEVELS
        return cls(tuple(level / mean for level in levels), link)

    @classmethod
    def measured(cls, scatter: Scatter) -> "Jitter":
        """As a calibration saw it."""
        return cls(scatter.compute or (1.0,), scatter.link)


NO_JITTER = Jitter()


@dataclass(frozen=True)
class Pipeline:
    """P stages and the P-1 hops between them, and what follows the last backward."""

    stages: tuple[StageTimes, ...]
    hops: tuple[Hop, ...]
    reduce: tuple[float, ...] = ()
    """Per stage, its gradients' all-reduce over the replicas; empty: none."""
    after: float = 0.0
    """The vote and the optimizer's step."""

    def __post_init__(self) -> None:
        if len(self.hops) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages have not {len(self.hops)} hops between")

    def slowed(self, factors: Sequence[float]) -> "Pipeline":
        """The same on devices of which stage s's takes ``factors[s]`` times as long."""
        return replace(
            self,
            stages=tuple(
                StageTimes(t.forward * by, t.recompute * by, t.backward * by, is_last=t.is_last)
                for t, by in zip(self.stages, factors, strict=True)
            ),
        )

    def step_seconds(self, ends: Sequence[float]) -> float:
        """When all is done, if stage s ends its last backward at ``ends[s]``."""
        reduce = self.reduce or (0.0,) * len(self.stages)
        return max(map(sum, zip(ends, reduce, strict=True))) + self.after


class Times:
    """Every task's and every message's seconds in one mini-batch."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: int,
        jitter: Jitter = NO_JITTER,
        seed: int = 0,
        last: float = 1.0,
    ) -> None:
        """``last``: the size of the last micro-batch, in full ones."""
        self.work: list[Mapping[Kind, list[float]]] = []
        """By stage and kind, each micro-batch's seconds."""
        chance = _Chance(seed)
        for stage, times in enumerate(pipeline.stages):
            parts = (times.forward, times.recompute, times.backward)
            work = {
                kind: _scattered(seconds, micro_batches, jitter.compute, chance.of(stage, at))
                for at, (kind, seconds) in enumerate(zip(Kind, parts, strict=True))
            }
            for each in work.values():
                each[-1] *= last
            self.work.append(work)
        self.latency: list[tuple[list[float], list[float]]] = [
            tuple(  # type: ignore[misc]  # a pair: forward, backward
                _late(hop, micro_batches, jitter.link, chance.of(stage, 3 + way))
                for way in range(2)
            )
            for stage, hop in enumerate(pipeline.hops)
        ]
        """By hop, each micro-batch's latency forward and backward."""


def _scattered(
    seconds: float, count: int, levels: Sequence[float], luck: Iterator[int]
) -> list[float]:
    if len(levels) == 1:
        return [seconds] * count
    size = len(levels)
    return [seconds * levels[next(luck) * size >> 20] for _ in range(count)]


def _late(hop: Hop, count: int, jitter: float, luck: Iterator[int]) -> list[float]:
    if not jitter:
        return [hop.latency] * count
    mean = jitter * hop.seconds
    return [hop.latency - mean * log((next(luck) + 0.5) / (1 << 20)) for _ in range(count)]


class _Chance:
    """Streams of 20 random bits, each by its own key."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, stage: int, what: int) -> Iterator[int]:
        """The stream of ``what`` on ``stage``."""
        state = _mixed(_mixed(self._seed & _MASK) ^ _mixed(stage * 8 + what + 1))
        while True:  # Knuth's MMIX generator; the upper bits are the good ones
            state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
            yield state >> 44


_MASK = (1 << 64) - 1


def _mixed(number: int) -> int:
    """Splitmix64's finisher: near numbers become far ones."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
