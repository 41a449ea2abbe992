"""Which shapes there are: depth x replicas that so many devices can hold, and of which micro-batch.
PURE.
"""

from collections.abc import Iterator

from trainer.contract.costs import LayerCosts
from trainer.contract.spec import Shape

LARGEST_AUTO_MICRO_BATCH = 16
LEVELLED = 1.1
"""A sample may take so much longer than at the best size."""


def shapes(layers: int, devices: int, batch_size: int, micro_batch: int) -> Iterator[Shape]:
    """Every shape with depth <= layers and depth * replicas <= devices in which each replica gets
    at least one micro-batch. Devices may stay spare.
    """
    most = micro_batches(batch_size, micro_batch)
    for depth in range(1, min(layers, devices) + 1):
        for replicas in range(1, min(devices // depth, most) + 1):
            yield Shape(depth=depth, replicas=replicas, micro_batch=micro_batch)


def micro_batches(batch_size: int, micro_batch: int) -> int:
    """How many micro-batches a global batch has; the last may be short."""
    return -(-batch_size // micro_batch)


def largest_micro_batch(batch_size: int, fewest_nodes: int, most_nodes: int | None = None) -> int:
    """The most that a job which leaves it to us may get: a power of two.

    Small enough for four micro-batches a node at the job's least number of nodes, so that a
    pipeline fills, and for one a node at its most.
    """
    most = min(LARGEST_AUTO_MICRO_BATCH, batch_size // (4 * fewest_nodes))
    if most_nodes is not None:
        most = min(most, batch_size // most_nodes)
    return 1 << (max(most, 1).bit_length() - 1)


def auto_micro_batch(
    costs: LayerCosts | None, batch_size: int, fewest_nodes: int, most_nodes: int | None
) -> int:
    """What a job gets that leaves it to us; the largest that it may while nothing is measured."""
    largest = largest_micro_batch(batch_size, fewest_nodes, most_nodes)
    return levelled_micro_batch(costs, largest) if costs else largest


def levelled_micro_batch(costs: LayerCosts, largest: int) -> int:
    """The smallest size at which a sample takes about as little as at any: larger ones would only
    make the pipeline fill more slowly.
    """
    known = {costs.micro_batch, *(one.micro_batch for one in costs.layers[0].sizes)}
    sizes = sorted(size for size in known if size <= largest) or [largest]
    each = {size: _sample_seconds(costs, size) for size in sizes}
    return next(size for size in sizes if each[size] <= LEVELLED * min(each.values()))


def _sample_seconds(costs: LayerCosts, size: int) -> float:
    work = sum(2 * one.forward_seconds + one.backward_seconds for one in costs.at(size))
    return (work + 3 * costs.task_seconds) / size
