"""The rule: forward, recompute or backward next? The trainer obeys it, the simulator plays it.

PURE. Each stage of a pipeline has a static order of tasks, fixed by (schedule, stages, micro-
batches). At run time a :class:`StageState` hears what has arrived and says what to run next: the
static order, but where a ``varuna`` stage would recompute before the gradient has come, the next
forward runs instead, as long as the in-flight cap allows.

    F(m)  forward; keeps the stage's input, and the graph only where no R follows
    R(m)  forward again, with a graph    (the last stage runs F, B, F, B ... and needs none)
    B(m)  backward; lets go of graph and input

Source: Varuna (arXiv 2111.04007), section 3.2 and its public code; the cap is ours.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainer.contract.spec import ScheduleName

OUTSTANDING = 4
"""A trainer starts no further message of a link before the one so many back has arrived."""


class Kind(StrEnum):
    """What a task does; the value is its text form."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


class Task(NamedTuple):
    """One stage's work on one micro-batch, which counts from 0 within the replica."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Order = tuple[Task, ...]


@lru_cache(maxsize=64)
def static_order(
    schedule: ScheduleName,
    stages: int,
    micro_batches: int,
    in_flight: tuple[int, ...] | None = None,
) -> tuple[Order, ...]:
    """Per stage, its tasks in the order in which they run when nothing is late.

    ``in_flight``: at most so many at each stage, where memory is short; only ``varuna`` makes do
    with fewer than it would have. Raises ValueError.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"no schedule for {stages} stages and {micro_batches} micro-batches")
    if schedule == "varuna":
        return _list_schedule(stages, micro_batches, in_flight or (micro_batches,) * stages)
    if schedule == "1f1b":
        lead = (stages - s for s in range(stages))
        return tuple(_backward_when_leading(n, micro_batches, recompute=n > 1) for n in lead)
    all_forwards_first = _backward_when_leading(micro_batches, micro_batches, recompute=True)
    return (all_forwards_first,) * stages


def usual_in_flight(schedule: ScheduleName, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Per stage, as many micro-batches as the unbounded order may have in flight."""
    most = (micro_batches,) * stages
    if schedule == "varuna":
        most = tuple(max(1, 3 * (stages - 1 - stage)) for stage in range(stages))
    elif schedule == "1f1b":
        most = tuple(stages - stage for stage in range(stages))
    return tuple(min(one, micro_batches) for one in most)


def as_text(order: Order) -> str:
    """``F0 F1 R0 B0 ...``"""
    return " ".join(map(str, order))


def ticks(schedule: ScheduleName, stages: int, micro_batches: int) -> int:
    """How long the static order takes when F = R = 1, B = 2 and transfers take no time."""
    waiting = [deque(order) for order in static_order(schedule, stages, micro_batches)]
    ended: dict[tuple[int, Task], int] = {}
    free_at = [0] * stages
    while any(waiting):
        for stage, tasks in enumerate(waiting):
            while tasks:
                source = _comes_from(schedule, stage, stages, tasks[0])
                if source is not None and source not in ended:
                    break
                task = tasks.popleft()
                start = max(free_at[stage], ended[source] if source else 0)
                free_at[stage] = start + (2 if task.kind is Kind.BACKWARD else 1)
                ended[stage, task] = free_at[stage]
    return max(free_at)


def _comes_from(
    schedule: ScheduleName, stage: int, stages: int, task: Task
) -> tuple[int, Task] | None:
    """The stage and task on another stage that ``task`` waits for."""
    if task.kind is Kind.FORWARD:
        return (stage - 1, task) if stage > 0 else None
    if stage == stages - 1 or (task.kind is Kind.RECOMPUTE and _recomputes_early(schedule)):
        return None
    return stage + 1, Task(Kind.BACKWARD, task.micro_batch)


def most_in_flight(order: Order) -> int:
    """The most micro-batches that, in ``order``, are ever forwarded and not yet backwarded."""
    now = most = 0
    for kind, _ in order:
        now += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD)
        most = max(most, now)
    return most


@dataclass(frozen=True)
class StagePlan:
    """What one stage goes by in every mini-batch."""

    order: Order
    is_first: bool
    is_last: bool
    cap: int
    """In flight (forwarded, not yet backwarded) never passes it."""
    runs_ahead: bool
    """May run a later forward instead of a recompute whose gradient has not come."""
    recomputes_early: bool
    """Takes up a recompute in its place, before its gradient has come; else it waits, as libraries
    that recompute inside of the backward do.
    """

    @classmethod
    def of(
        cls,
        schedule: ScheduleName,
        stage: int,
        stages: int,
        micro_batches: int,
        in_flight: int | None = None,
        *,
        caps: Sequence[int] | None = None,
        runs_ahead: bool = True,
    ) -> "StagePlan":
        """The plan of ``stage``; ``in_flight`` None means as many as the static order needs.

        ``caps``: those of all stages, which the order is made under. ``runs_ahead`` False: the
        order as it stands. Raises ValueError when ``in_flight`` is less than the order needs.
        """
        order = static_order(schedule, stages, micro_batches, tuple(caps) if caps else None)[stage]
        needed = most_in_flight(order)
        if caps:
            in_flight = caps[stage]
        if in_flight is not None and in_flight < needed:
            raise ValueError(f"stage {stage} needs {needed} micro-batches in flight: {in_flight}")
        return cls(
            order=order,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            cap=in_flight or needed,
            runs_ahead=runs_ahead and schedule == "varuna",
            recomputes_early=_recomputes_early(schedule),
        )

    @cached_property
    def micro_batches(self) -> int:
        """How many there are in one mini-batch."""
        return sum(kind is Kind.FORWARD for kind, _ in self.order)

    @cached_property
    def recomputes(self) -> bool:
        """Whether forwards keep only their input."""
        return any(kind is Kind.RECOMPUTE for kind, _ in self.order)


class StageState:
    """One stage during one mini-batch: what has arrived, what has run, what runs next."""

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        self._at = 0
        self._forwards = 0
        self._backwards = 0
        self._inputs: set[int] = set()
        self._gradients: set[int] = set()

    def arrived(self, kind: Kind, micro_batch: int) -> None:
        """The input (FORWARD) or the gradient (BACKWARD) of ``micro_batch`` is here.

        The first stage's inputs and the last stage's gradients always are.
        """
        (self._inputs if kind is Kind.FORWARD else self._gradients).add(micro_batch)

    @property
    def is_done(self) -> bool:
        """Whether every micro-batch has run backward."""
        return self._backwards == self._plan.micro_batches

    @property
    def in_flight(self) -> int:
        """Micro-batches forwarded and not yet backwarded."""
        return self._forwards - self._backwards

    def next_task(self) -> Task | None:
        """What to run now, which from now on counts as run; None: wait for an arrival."""
        if self.is_done:
            return None
        task = self._next_in_order()
        if task.kind is Kind.RECOMPUTE and not self._has_gradient(task.micro_batch):
            if self._may_run_ahead():
                return self._run(Task(Kind.FORWARD, self._forwards))
            return self._run(task) if self._plan.recomputes_early else None
        return self._run(task) if self._has_arrived(task) else None

    def _next_in_order(self) -> Task:
        """The head of the static order, past the forwards that ran ahead of it."""
        order = self._plan.order
        while order[self._at].kind is Kind.FORWARD and order[self._at].micro_batch < self._forwards:
            self._at += 1
        return order[self._at]

    def _may_run_ahead(self) -> bool:
        plan = self._plan
        return (
            plan.runs_ahead
            and self._forwards < plan.micro_batches
            and self.in_flight < plan.cap
            and self._has_input(self._forwards)
        )

    def _has_arrived(self, task: Task) -> bool:
        if task.kind is Kind.FORWARD:
            return self._has_input(task.micro_batch)
        return self._has_gradient(task.micro_batch)

    def _has_input(self, micro_batch: int) -> bool:
        return self._plan.is_first or micro_batch in self._inputs

    def _has_gradient(self, micro_batch: int) -> bool:
        return self._plan.is_last or micro_batch in self._gradients

    def _run(self, task: Task) -> Task:
        self._forwards += task.kind is Kind.FORWARD
        self._backwards += task.kind is Kind.BACKWARD
        if task == self._plan.order[self._at]:
            self._at += 1
        return task


def _recomputes_early(schedule: ScheduleName) -> bool:
    return schedule == "varuna"


def _list_schedule(
    stages: int, micro_batches: int, in_flight: tuple[int, ...]
) -> tuple[Order, ...]:
    """Each tick each stage runs one unit: the second half of a backward, else the start of one,
    else a recompute, else a forward, if fewer than ``in_flight`` are; each kind in micro-batch
    order, so that a count says what is ready and what has run. What a tick makes ready is released
    when it ends.
    """
    if len(in_flight) != stages or min(in_flight) < 1:
        raise ValueError(f"{stages} stages cannot have {in_flight} micro-batches in flight")
    last = stages - 1
    forwards, recomputes, backwards = (
        [Task(kind, m) for m in range(micro_batches)] for kind in Kind
    )
    ready_f, ready_r, ready_b = [0] * stages, [0] * stages, [0] * stages
    ran_f, ran_r, ran_b = [0] * stages, [0] * stages, [0] * stages
    ready_f[0] = micro_batches
    in_second_half = [False] * stages
    orders: list[list[Task]] = [[] for _ in range(stages)]
    while ran_b[0] < micro_batches:
        released: list[tuple[list[int], int]] = []
        for stage in range(stages):
            if in_second_half[stage]:
                in_second_half[stage] = False
            elif (m := ran_b[stage]) < ready_b[stage]:
                orders[stage].append(backwards[m])
                ran_b[stage] = m + 1
                in_second_half[stage] = True
                if stage > 0:  # so that the recompute ends just when the gradient arrives
                    released.append((ready_r, stage - 1))
            elif (m := ran_r[stage]) < ready_r[stage]:
                orders[stage].append(recomputes[m])
                ran_r[stage] = m + 1
                released.append((ready_b, stage))
            elif (m := ran_f[stage]) < ready_f[stage] and m - ran_b[stage] < in_flight[stage]:
                orders[stage].append(forwards[m])
                ran_f[stage] = m + 1
                released.append((ready_b, stage) if stage == last else (ready_f, stage + 1))
        for ready, stage in released:
            ready[stage] += 1
    return tuple(map(tuple, orders))


def _backward_when_leading(lead: int, micro_batches: int, *, recompute: bool) -> Order:
    """Forwards until ``lead`` are in flight, then a backward before each further forward."""
    order: list[Task] = []
    forwards = 0
    for m in range(micro_batches):
        while forwards < min(m + lead, micro_batches):
            order.append(Task(Kind.FORWARD, forwards))
            forwards += 1
        if recompute:
            order.append(Task(Kind.RECOMPUTE, m))
        order.append(Task(Kind.BACKWARD, m))
    return tuple(order)
