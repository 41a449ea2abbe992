"""The same mini-batch where nothing is decided on the way: the longest path through it. PURE.

When every stage keeps to its order (all schedules but ``varuna``), a task starts when the one
before it has ended and its message is here: no queue of events, one look at each task.
"""

from collections.abc import Sequence
from itertools import cycle

from controller.planner.pipeline import NO_JITTER, Jitter, Pipeline, Played, Times
from controller.planner.simulate import Run
from trainer.contract.schedule import OUTSTANDING, Kind, Order, most_in_flight, static_order


def longest_path(
    pipeline: Pipeline,
    schedule: Played,
    micro_batches: int,
    *,
    jitter: Jitter = NO_JITTER,
    seed: int = 0,
    last: float = 1.0,
) -> Run:
    """As :func:`controller.planner.simulate.play`; ``varuna`` counts as ``varuna-static``."""
    depth = len(pipeline.stages)
    name = "varuna" if schedule == "varuna-static" else schedule
    orders = static_order(name, depth, micro_batches)
    times = Times(pipeline, micro_batches, jitter, seed, last)
    stages = [_Stage(order) for order in orders]
    for at, hop in enumerate(pipeline.hops):
        ahead, back = times.latency[at]
        upper, lower = stages[at], stages[at + 1]
        upper.waits = name != "varuna"
        upper.down = _Link(hop.busy, ahead)
        lower.up = _Link(hop.busy, back)
        lower.inputs, upper.gradients = upper.down.arrivals, lower.up.arrivals
    rounds = cycle((range(depth), range(depth - 1, -1, -1)))
    while any(stage.at < len(stage.order) for stage in stages):
        for at in next(rounds):
            _go(stages[at], *times.work[at].values())
    busy = 0.0
    for work, order in zip(times.work, orders, strict=True):
        recomputes = any(kind is Kind.RECOMPUTE for kind, _ in order)
        busy += sum(sum(s) for kind, s in work.items() if recomputes or kind is not Kind.RECOMPUTE)
    return Run.of(pipeline, [s.ended for s in stages], busy, [most_in_flight(o) for o in orders])


class _Link:
    """From one stage to a neighbour, one way; ``arrivals`` by micro-batch."""

    __slots__ = ("arrivals", "busy", "free_at", "latency")

    def __init__(self, busy: float, latency: Sequence[float]) -> None:
        self.busy = busy
        self.latency = latency
        self.free_at = 0.0
        self.arrivals: list[float] = []

    def send(self, micro_batch: int, ready: float) -> float:
        """When it leaves the sender's hands."""
        arrivals = self.arrivals
        if micro_batch >= OUTSTANDING and arrivals[-OUTSTANDING] > ready:
            ready = arrivals[-OUTSTANDING]
        start = self.free_at if self.free_at > ready else ready
        self.free_at = start + self.busy
        arrives = self.free_at + self.latency[micro_batch]
        if arrivals and arrivals[-1] > arrives:
            arrives = arrivals[-1]
        arrivals.append(arrives)
        return ready


class _Stage:
    """How far one stage is."""

    __slots__ = (
        "at", "down", "ended", "free_at", "gradients", "inputs", "order", "up", "waits",
    )  # fmt: skip

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waits = False
        """A recompute begins when the gradient is here."""
        self.at = 0
        self.free_at = 0.0
        self.ended = 0.0
        self.inputs: list[float] | None = None
        """When they arrived; None: they are here from the start. So with ``gradients``."""
        self.gradients: list[float] | None = None
        self.down: _Link | None = None
        self.up: _Link | None = None


def _go(
    stage: _Stage, forward: Sequence[float], recompute: Sequence[float], backward: Sequence[float]
) -> None:
    """Do all that can be done; the hot loop, hence its plainness."""
    order, inputs, gradients, waits = stage.order, stage.inputs, stage.gradients, stage.waits
    is_forward, is_recompute = Kind.FORWARD, Kind.RECOMPUTE
    at, now, count = stage.at, stage.free_at, len(order)
    while at < count:
        kind, m = order[at]
        if kind is is_forward:
            if inputs is not None:
                if m >= len(inputs):
                    break
                if inputs[m] > now:
                    now = inputs[m]
            now += forward[m]
            if stage.down:
                now = stage.down.send(m, now)
        else:
            if gradients is not None and (waits or kind is not is_recompute):
                if m >= len(gradients):
                    break
                if gradients[m] > now:
                    now = gradients[m]
            if kind is is_recompute:
                now += recompute[m]
            else:
                stage.ended = now = now + backward[m]
                if stage.up:
                    now = stage.up.send(m, now)
        at += 1
    stage.at, stage.free_at = at, now
