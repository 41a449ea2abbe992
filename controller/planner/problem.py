"""What a plan is made for. PURE."""

from dataclasses import dataclass

from controller.planner.shapes import micro_batches
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import ScheduleName


@dataclass(frozen=True)
class Depths:
    """The depths that the user allows; ``most`` None: no upper bound."""

    fewest: int = 1
    most: int | None = None

    def allow(self, depth: int) -> bool:
        """Whether ``depth`` is among them."""
        return self.fewest <= depth and (self.most is None or depth <= self.most)


@dataclass(frozen=True)
class Problem:
    """All that a choice depends on, but for how many nodes there are."""

    costs: LayerCosts
    batch_size: int
    micro_batch: int
    depths: Depths = Depths()
    schedule: ScheduleName = "varuna"
    device_memory_bytes: int = 0
    """Of the smallest device; 0: unknown, not checked."""
    devices_per_node: int = 1

    @property
    def micro_batches(self) -> int:
        """How many the global batch has; the last may be short."""
        return micro_batches(self.batch_size, self.micro_batch)

    def per_replica(self, replicas: int) -> int:
        """How many the replica that has most of them has."""
        return -(-self.micro_batches // replicas)

    def last_size(self, replicas: int) -> float:
        """The last micro-batch of that replica, in full ones: only a sole replica has the short
        one for sure.
        """
        short = self.batch_size - (self.micro_batches - 1) * self.micro_batch
        return short / self.micro_batch if replicas == 1 else 1.0
