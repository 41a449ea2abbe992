"""Play one mini-batch, event by event, by the rule that the trainer obeys. PURE.

Every stage is a :class:`trainer.contract.schedule.StageState`, asked for its next task whenever it
is free: what has arrived by then decides. A message leaves when its task ends, waits for the link
and for the one :data:`OUTSTANDING` messages back (so does the stage, as the trainer's main loop
does), and arrives in order. Where the order is fixed beforehand, :mod:`controller.planner.longest`
gives the same numbers faster.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from controller.planner.pipeline import NO_JITTER, Jitter, Pipeline, Played, Times
from trainer.contract.schedule import OUTSTANDING, Kind, StagePlan, StageState, Task


class Span(NamedTuple):
    """A task as it ran, in seconds since the mini-batch began."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """One mini-batch, played."""

    pipeline_seconds: float
    """From the first forward's start to the last backward's end."""
    step_seconds: float
    """... until gradients are summed, voted and applied."""
    bubble: float
    """The part of the pipeline's time in which a stage does nothing, mean over the stages."""
    in_flight_peak: tuple[int, ...]
    """Per stage, the most micro-batches forwarded and not yet backwarded."""
    ends: tuple[float, ...]
    """Per stage, its last backward's end."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """Per stage, all it did, when that was asked for."""

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        ends: Sequence[float],
        busy: float,
        peaks: Sequence[int],
        spans: Sequence[Sequence[Span]] = (),
    ) -> "Run":
        """``busy``: seconds of work, all stages together."""
        whole = max(ends)
        return cls(
            pipeline_seconds=whole,
            step_seconds=pipeline.step_seconds(ends),
            bubble=1 - busy / (whole * len(ends)) if whole else 0.0,
            in_flight_peak=tuple(peaks),
            ends=tuple(ends),
            spans=tuple(map(tuple, spans)),
        )


def plans_of(
    schedule: Played, stages: int, micro_batches: int, in_flight: Sequence[int] | None = None
) -> list[StagePlan]:
    """What each stage goes by. Raises ValueError when it cannot be had with so few in flight."""
    name = "varuna" if schedule == "varuna-static" else schedule
    return [
        StagePlan.of(
            name,
            stage,
            stages,
            micro_batches,
            caps=in_flight,
            runs_ahead=schedule == "varuna",
        )
        for stage in range(stages)
    ]


def play(
    pipeline: Pipeline,
    schedule: Played,
    micro_batches: int,
    *,
    in_flight: Sequence[int] | None = None,
    jitter: Jitter = NO_JITTER,
    seed: int = 0,
    last: float = 1.0,
    watched: bool = False,
) -> Run:
    """Play ``micro_batches`` (of one replica) through ``pipeline``.

    ``last``: the size of the last micro-batch, in full ones; ``watched``: keep every span.
    """
    times = Times(pipeline, micro_batches, jitter, seed, last)
    plans = plans_of(schedule, len(pipeline.stages), micro_batches, in_flight)
    stages = [_Stage(plan, work, watched) for plan, work in zip(plans, times.work, strict=True)]
    for at, hop in enumerate(pipeline.hops):
        ahead, back = times.latency[at]
        stages[at].down = _Link(stages[at + 1], Kind.FORWARD, hop.busy, ahead)
        stages[at + 1].up = _Link(stages[at], Kind.BACKWARD, hop.busy, back)
    _run(stages)
    spans = [stage.ran for stage in stages] if watched else ()
    peaks = [stage.peak for stage in stages]
    busy = sum(stage.busy for stage in stages)
    return Run.of(pipeline, [stage.ended for stage in stages], busy, peaks, spans)


def _run(stages: Sequence["_Stage"]) -> None:
    """Events in order of time, then of their making."""
    number = count()
    due = [(0.0, next(number), stage) for stage in stages]
    heapify(due)
    while due:
        now, _, stage = heappop(due)
        if stage.free_at > now:
            continue  # woken by an arrival, and at work already
        for at, woken in stage.go_on(now):
            heappush(due, (at, next(number), woken))


class _Link:
    """From one stage to a neighbour, one way."""

    __slots__ = ("arrivals", "busy", "free_at", "kind", "latency", "to")

    def __init__(self, to: "_Stage", kind: Kind, busy: float, latency: Sequence[float]) -> None:
        self.to = to
        self.kind = kind
        self.busy = busy
        self.latency = latency
        self.free_at = 0.0
        self.arrivals: deque[float] = deque(maxlen=OUTSTANDING)

    def send(self, micro_batch: int, ready: float) -> tuple[float, float]:
        """When it leaves the sender's hands, and when it arrives."""
        arrivals = self.arrivals
        if len(arrivals) == OUTSTANDING and arrivals[0] > ready:
            ready = arrivals[0]
        start = self.free_at if self.free_at > ready else ready
        self.free_at = start + self.busy
        arrives = self.free_at + self.latency[micro_batch]
        if arrivals and arrivals[-1] > arrives:
            arrives = arrivals[-1]
        arrivals.append(arrives)
        self.to.inbox[self.kind].append((arrives, micro_batch))
        return ready, arrives


class _Stage:
    """One stage at work: its state, its inbox, what it has done."""

    __slots__ = (
        "busy", "down", "ended", "free_at", "idle", "inbox", "peak", "ran", "state", "up",
        "watched", "work",
    )  # fmt: skip

    def __init__(self, plan: StagePlan, work: Mapping[Kind, list[float]], watched: bool) -> None:
        self.watched = watched
        self.state = StageState(plan)
        self.work = work
        self.inbox: dict[Kind, deque[tuple[float, int]]] = {
            Kind.FORWARD: deque(),
            Kind.BACKWARD: deque(),
        }
        self.down: _Link | None = None
        self.up: _Link | None = None
        self.free_at = 0.0
        self.idle = False
        self.busy = 0.0
        self.ended = 0.0
        self.peak = 0
        self.ran: list[Span] = []

    def go_on(self, now: float) -> Iterator[tuple[float, "_Stage"]]:
        """Take what has arrived, begin the next task; when who is to be asked again."""
        state = self.state
        for kind, messages in self.inbox.items():
            while messages and messages[0][0] <= now:
                state.arrived(kind, messages.popleft()[1])
        task = state.next_task()
        self.idle = task is None
        if task is None:
            for messages in self.inbox.values():
                if messages:
                    yield messages[0][0], self
            return
        kind, micro_batch = task
        seconds = self.work[kind][micro_batch]
        end = self.free_at = now + seconds
        self.busy += seconds
        if self.watched:
            self.ran.append(Span(task, now, end))
        if kind is not Kind.RECOMPUTE:
            if state.in_flight > self.peak:
                self.peak = state.in_flight
            link = self.down if kind is Kind.FORWARD else self.up
            if kind is Kind.BACKWARD:
                self.ended = end
            if link is not None:
                self.free_at, arrives = link.send(micro_batch, end)
                if link.to.idle:
                    yield arrives, link.to
        yield self.free_at, self
