"""What a stage holds, and how many micro-batches it may have in flight for that. PURE.

    parameters, gradients, optimizer's state     bytes of parameters x the measured copies
    stash       the inputs of micro-batches in flight, and those received but not yet run: no more
                than are in flight one stage above, which lets go of each later
    graph       one recomputed set (more is never alive), its output and the gradient that came
    messages    on their way out, both ways

A stage whose stash does not fit gets a lower in-flight cap; the order is then made under it
(trainer/contract/schedule.py), which costs time, and simulation says how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.planner.cutting import Cutting
from trainer.contract.schedule import OUTSTANDING, usual_in_flight
from trainer.contract.spec import ScheduleName


@dataclass(frozen=True)
class StageBytes:
    """Of one device."""

    state: float
    """Parameters, gradients, optimizer's state."""
    input: float
    """One stashed input."""
    stashed: int
    """How many, at most."""
    graph: float
    messages: float

    @property
    def total(self) -> int:
        """All of it."""
        return round(self.state + self.input * self.stashed + self.graph + self.messages)


@dataclass(frozen=True)
class TooBig:
    """With the fewest that can be in flight, ``stage`` needs so much."""

    stage: int
    num_bytes: int


def held(
    cutting: Cutting, copies: float, in_flight: Sequence[int], micro_batches: int
) -> tuple[StageBytes, ...]:
    """Per stage, what it holds when each has at most ``in_flight`` micro-batches in flight."""
    handed = (0.0, *cutting.handed_bytes, 0.0)
    above = (in_flight[0], *in_flight)
    return tuple(
        StageBytes(
            state=copies * cutting.parameter_bytes[stage],
            input=handed[stage],
            stashed=min(micro_batches, max(in_flight[stage], above[stage])),
            graph=cutting.graph_bytes[stage] + handed[stage + 1],
            messages=min(OUTSTANDING, micro_batches) * (handed[stage] + handed[stage + 1]),
        )
        for stage in range(cutting.depth)
    )


def in_flight_caps(
    cutting: Cutting, copies: float, schedule: ScheduleName, micro_batches: int, memory: int
) -> tuple[int, ...] | TooBig:
    """Per stage, the most that may be in flight: what the schedule's own order takes, or as many as
    ``memory`` bytes hold (0: any); only ``varuna`` can do with fewer.
    """
    usual = usual_in_flight(schedule, cutting.depth, micro_batches)
    if not memory:
        return usual
    least = usual if schedule != "varuna" else (1,) * cutting.depth
    handed, above, room = (0.0, *cutting.handed_bytes, 0.0), least[0], []
    sending = min(OUTSTANDING, micro_batches)
    worst = TooBig(0, 0)
    for stage, state in enumerate(
        cutting.parameter_bytes
    ):  # as in `held`, for every shape there is
        one, on = handed[stage], handed[stage + 1]
        rest = copies * state + cutting.graph_bytes[stage] + on + sending * (one + on)
        needed = rest + one * max(least[stage], above)
        above = least[stage]
        if needed > memory and needed > worst.num_bytes:
            worst = TooBig(stage, round(needed))
        room.append(int((memory - rest) / one) if one else usual[stage])
    if worst.num_bytes:
        return worst
    below = (*room[1:], room[-1])  # what stands before a stage is in flight above it
    return tuple(map(min, usual, room, below))
