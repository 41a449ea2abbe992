"""What steps really take, taken into the costs that plans are made by. PURE.

Layers keep their proportions, which a calibration sees better; their common level follows the
ranks' tasks (the median over stages of what they take of what was calibrated), and the sum of
gradients follows the rank that waited least for others. A slow node's tasks teach nothing, nor does
what moves costs by less than :data:`MOVED`: tables are made anew when they move.
"""

from statistics import median

from controller.core.seating import Slow
from controller.core.world import Generation, Job
from controller.planner.cutting import Model
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import WINDOWS
from trainer.contract.topology import Seat

MOVED = 0.03
STEPS = 50
"""Between two looks."""
_MOST_AT_ONCE = 4.0


def learned(job: Job, generation: Generation, slow: Slow) -> LayerCosts | None:
    """The costs as its steps say they are; None: as they are known, or too early to say."""
    costs, shape = job.costs, generation.shape
    if costs is None or shape is None or not generation.cuts:
        return None
    if abs(generation.committed - costs.learned_at_step) < STEPS:
        return None
    if any(len(seat.paces) < WINDOWS for seat in generation.seats):
        return None
    cutting = Model(costs, shape.micro_batch).cut_at(generation.cuts)
    levels, reduced = [], []
    expected = cutting.reducing(costs, shape.replicas)
    for seat in generation.seats:
        stage = Seat.of(seat.rank, shape).stage
        took = median(
            p.forward_seconds + p.recompute_seconds + p.backward_seconds for p in seat.paces
        )
        usual = cutting.times[stage].each
        if usual and (seat.node, seat.incarnation) not in slow:
            levels.append(took / usual)
        if expected[stage]:
            reduced.append(min(p.reduce_seconds for p in seat.paces) / expected[stage])
    level = _bounded(median(levels)) if levels else 1.0
    reducing = _bounded(min(reduced)) if reduced else 1.0
    if abs(level - 1) < MOVED and abs(reducing - 1) < MOVED:
        return None
    return costs.at_level(level, reducing, generation.committed)


def _bounded(factor: float) -> float:
    return min(_MOST_AT_ONCE, max(1 / _MOST_AT_ONCE, factor))
