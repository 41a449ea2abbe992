"""What the layers of a program cost: measured by the trainer, read by the planner."""

from pydantic import Field

from trainer.contract.spec import FINITE_POSITIVE, Frozen


class LayerCost(Frozen):
    """One layer (what lies between two cut-points) at the micro-batch size of its
    :class:`LayerCosts`.
    """

    name: str
    """The module's class name, for people."""
    forward_seconds: float = Field(ge=0)
    backward_seconds: float = Field(ge=0)
    parameter_bytes: int = Field(ge=0)
    output_bytes: int = Field(ge=0)
    """What it hands to the next layer for one micro-batch."""


class LayerCosts(Frozen):
    """All layers in order. Measured roughly: one process, this machine, two warm passes."""

    version: int = 1
    micro_batch: int = Field(ge=1)
    layers: tuple[LayerCost, ...] = Field(min_length=1)
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that hold one and the same weight, the owner (the lowest index) first."""
    measured_seconds: FINITE_POSITIVE | None = None
    """How long measuring took."""
