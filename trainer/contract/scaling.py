"""The loss scale of float16: how far the loss is scaled up before the backward pass, so that small
gradients are not lost, and when that changes. PURE.

It follows from the steps' votes alone, so all ranks have the same, and it goes into every
checkpoint: a replay skips what the first run skipped.
"""

from pydantic import Field

from trainer.contract.spec import Frozen

GROWTH_STEPS = 2000
"""After so many good steps in a row the scale doubles."""
FIRST_SCALE = 2.0**12
"""Of sums over samples; of means torch begins with 2**16."""
SMALLEST_SCALE = 2.0**-14
"""A step that is not finite even so has another cause than the scale."""


class LossScale(Frozen):
    """As it stands after a step; powers of two, which change no bit of a mantissa."""

    scale: float = Field(default=FIRST_SCALE, gt=0)
    good_steps: int = Field(default=0, ge=0)
    """In a row, since the scale last changed."""

    def after(self, is_finite: bool) -> "LossScale":
        """The scale after one more step, whose loss and gradients were finite or not."""
        if not is_finite:
            return LossScale(scale=self.scale / 2)
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(scale=self.scale * 2)
        return LossScale(scale=self.scale, good_steps=self.good_steps + 1)

    @property
    def is_smallest(self) -> bool:
        """Whether it is of no use to make it smaller still."""
        return self.scale <= SMALLEST_SCALE
