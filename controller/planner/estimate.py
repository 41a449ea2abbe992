"""What one mini-batch takes and holds under a shape: a closed form. PURE.

Under the varuna schedule a stage's F, R and B follow each other without a gap once the pipeline is
full, the recomputes hide in the waits of the fill, and the last stage never recomputes. So

    sum over stages (F + B)  +  (N - 1) * the largest stage (F + R + B)

which is within one tick of the schedule's own length for every golden case (engine.md, section 3).
To it come the sends along the pipeline, a ring all-reduce per layer and the commit vote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from controller.planner.balance import cut
from controller.planner.shapes import micro_batches
from trainer.contract.costs import LayerCost, LayerCosts
from trainer.contract.spec import Shape

ADAM_COPIES = 4
"""Parameters, gradients and two moments."""


@dataclass(frozen=True)
class Link:
    """What lies between two devices. The default is a spot VM's ordinary network under load."""

    latency_seconds: float = 0.001
    bytes_per_second: float = 125e6

    def send(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def all_reduce(self, num_bytes: float, replicas: int) -> float:
        """Seconds for a ring all-reduce of one buffer."""
        rounds = 2 * (replicas - 1)
        return rounds * (self.latency_seconds + num_bytes / replicas / self.bytes_per_second)


def balanced_cuts(costs: LayerCosts, depth: int) -> tuple[int, ...]:
    """Cut by F + R + B; by parameter bytes when no layer's time is known."""
    layers = costs.layers
    if any(layer.forward_seconds + layer.backward_seconds > 0 for layer in layers):
        return cut([_with_recompute(a) for a in layers], [_without(a) for a in layers], depth)
    num_bytes = [float(layer.parameter_bytes) for layer in layers]
    return cut(num_bytes, num_bytes, depth)


def step_seconds(
    costs: LayerCosts, shape: Shape, cuts: Sequence[int], batch_size: int, link: Link
) -> float:
    """Estimated seconds of one mini-batch."""
    scale = shape.micro_batch / costs.micro_batch
    stages = [costs.layers[a:b] for a, b in pairwise(cuts)]
    count = micro_batches(batch_size, shape.micro_batch)
    per_replica = min(count, -(-count // shape.replicas))
    once = [sum(map(_without, stage)) * scale for stage in stages]
    steady = [sum(map(_with_recompute, stage)) * scale for stage in stages[:-1]] + [once[-1]]
    sends = sum(2 * link.send(stage[-1].output_bytes * scale) for stage in stages[:-1])
    reduced = max(
        sum(link.all_reduce(layer.parameter_bytes, shape.replicas) for layer in stage)
        for stage in stages
    )
    vote = link.all_reduce(0, shape.world)
    return sum(once) + (per_replica - 1) * max(steady) + sends + reduced + vote


def stage_bytes(
    costs: LayerCosts, shape: Shape, cuts: Sequence[int], stage: int, batch_size: int
) -> int:
    """Estimated bytes that ``stage`` holds: parameters with gradients and Adam's moments, the
    stashed inputs of the micro-batches in flight, one micro-batch's activations.
    """
    scale = shape.micro_batch / costs.micro_batch
    held = costs.layers[cuts[stage] : cuts[stage + 1]]
    entering = costs.layers[cuts[stage] - 1].output_bytes * scale if stage else 0.0
    count = -(-micro_batches(batch_size, shape.micro_batch) // shape.replicas)
    in_flight = min(count, max(1, 3 * (shape.depth - 1 - stage)))
    activations = sum(layer.output_bytes for layer in held) * scale
    parameters = sum(layer.parameter_bytes for layer in held)
    return round(ADAM_COPIES * parameters + in_flight * entering + activations)


def _without(layer: LayerCost) -> float:
    return layer.forward_seconds + layer.backward_seconds


def _with_recompute(layer: LayerCost) -> float:
    return 2 * layer.forward_seconds + layer.backward_seconds
