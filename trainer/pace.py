"""How this rank's tasks go: a line every few steps, by which a slow node is found out and the
planner's picture is kept fresh.
"""

import time

from trainer.contract.progress import Paced
from trainer.contract.schedule import Kind
from trainer.pipeline import Pipeline

STEPS = 5
SECONDS = 2.0
"""A window is so many steps, and no shorter than that."""


class Pace:
    """Counts from the end of the first step on, which warms up."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._reduced = 0.0
        self._steps = -1
        self._begin()

    def reduced(self, seconds: float) -> None:
        """Gradients were summed for so long."""
        self._reduced += seconds

    def stepped(self, step: int) -> Paced | None:
        """A step is done; what to say of the window that ends with it."""
        self._steps += 1
        if self._steps == 0:
            self._begin()
        if self._steps < STEPS or time.monotonic() < self._began + SECONDS:
            return None
        worked = self._pipeline.worked
        count = self._steps * self._pipeline.full_micro_batches
        forward, recompute, backward = ((worked[k] - self._before[k]) / count for k in Kind)
        said = Paced(
            step=step,
            forward_seconds=forward,
            recompute_seconds=recompute,
            backward_seconds=backward,
            reduce_seconds=self._reduced / self._steps,
        )
        self._steps = 0
        self._begin()
        return said

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._before = dict(self._pipeline.worked)
        self._reduced = 0.0
