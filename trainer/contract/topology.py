"""Who sits where and who gets what:

rank <-> (stage, replica), cuts, and the dealing of micro-batches. PURE.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.contract.spec import Shape


@dataclass(frozen=True)
class Seat:
    """A rank's place. Consecutive ranks are consecutive stages, so that a node with several devices
    holds neighbours.
    """

    stage: int
    replica: int

    @classmethod
    def of(cls, rank: int, shape: Shape) -> "Seat":
        """The seat of ``rank``; ``rank`` = replica * depth + stage."""
        if not 0 <= rank < shape.world:
            raise ValueError(f"rank {rank} is not in a world of {shape.world}")
        return cls(stage=rank % shape.depth, replica=rank // shape.depth)

    def rank(self, shape: Shape) -> int:
        """The rank that sits here."""
        return self.replica * shape.depth + self.stage


def even_cuts(layers: int, depth: int) -> tuple[int, ...]:
    """Cut ``layers`` into ``depth`` stages of like layer count.

    ``depth`` + 1 rising indexes from 0 to ``layers``.
    """
    if not 1 <= depth <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {depth} stages")
    return tuple(stage * layers // depth for stage in range(depth + 1))


def check_cuts(cuts: Sequence[int], layers: int, depth: int) -> None:
    """Raise ValueError unless ``cuts`` hands every layer to exactly one of ``depth`` stages and no
    stage is empty.
    """
    rising = all(a < b for a, b in pairwise(cuts))
    if len(cuts) != depth + 1 or cuts[0] != 0 or cuts[-1] != layers or not rising:
        raise ValueError(f"cuts {tuple(cuts)} do not split {layers} layers into {depth} stages")


def stage_of(layer: int, cuts: Sequence[int]) -> int:
    """The stage that holds ``layer``."""
    return bisect_right(cuts, layer) - 1


def stages_of(layers: Iterable[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """The stages that hold ``layers``, each once, rising."""
    return tuple(sorted({stage_of(layer, cuts) for layer in layers}))


@dataclass(frozen=True)
class MicroBatch:
    """Samples ``start`` .. ``start + size - 1`` of the global batch.

    ``number`` counts over all replicas from 0.
    """

    number: int
    start: int
    size: int


def micro_batches(batch_size: int, shape: Shape) -> tuple[tuple[MicroBatch, ...], ...]:
    """Deal the global batch to the replicas: per replica its micro-batches, in order.

    Every sample goes to exactly one; replicas get floor or ceil of the micro-batches, the first
    ones more; only the globally last may be short. Raises ValueError when a replica would get none.
    """
    dealt = deal(batch_size, shape)
    if not dealt[-1]:
        raise ValueError(
            f"{sum(map(len, dealt))} micro-batches of {shape.micro_batch} are too few for "
            f"{shape.replicas} replicas"
        )
    return dealt


def deal(samples: int, shape: Shape) -> tuple[tuple[MicroBatch, ...], ...]:
    """The same for any number of samples; the last replicas may get none."""
    size = shape.micro_batch
    total = -(-samples // size)
    every = [MicroBatch(i, i * size, min(size, samples - i * size)) for i in range(total)]
    floor, more = divmod(total, shape.replicas)
    dealt, at = [], 0
    for replica in range(shape.replicas):
        count = floor + (replica < more)
        dealt.append(tuple(every[at : at + count]))
        at += count
    return tuple(dealt)
