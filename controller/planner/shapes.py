"""Which shapes there are: depth x replicas that so many devices can hold. PURE."""

from collections.abc import Iterator

from trainer.contract.spec import Shape

LARGEST_AUTO_MICRO_BATCH = 4


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


def auto_micro_batch(batch_size: int, fewest_nodes: int) -> int:
    """The micro-batch of a job that leaves it to us: a power of two, the same through every morph,
    since it depends only on the batch and on the job's least number of nodes.

    Small enough for four micro-batches a node at the job's least, so that a pipeline fills.
    """
    most = min(LARGEST_AUTO_MICRO_BATCH, batch_size // (4 * fewest_nodes))
    return 1 << (max(most, 1).bit_length() - 1)
