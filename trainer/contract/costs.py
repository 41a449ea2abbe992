"""What a program costs on one kind of device: measured by the trainer, read by the planner.

A documented JSON. Version 1 had layers at one micro-batch and nothing of the network; it is still
read: what it lacks has defaults that say "not measured".

    layers       per layer F and B (a recompute takes F) for a few micro-batches, bytes
    links        a message: latency + bytes / bandwidth, within a node and between nodes
    all_reduce   over D ranks: 2 (D-1) rounds of latency a tensor + bytes / bandwidth x 2 (D-1) / D
    jitter       how single times scatter
    moving       what a new generation writes and loads

Seconds and bytes throughout.
"""

from bisect import bisect_left
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from trainer.contract.spec import FINITE_POSITIVE, Frozen

VERSION = 2
SECONDS = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
NUM_BYTES = Annotated[int, Field(ge=0, le=1 << 60)]
BYTES_PER_SECOND = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]
"""Bounds beyond which sums would lose their meaning."""


class AtSize(Frozen):
    """One layer at one micro-batch size."""

    micro_batch: int = Field(ge=1)
    forward_seconds: SECONDS
    backward_seconds: SECONDS
    saved_bytes: NUM_BYTES = 0
    """What its graph keeps for the backward, parameters not counted; 0: not measured."""


class LayerCost(Frozen):
    """One layer (what lies between two cut-points) at the micro-batch size of its
    :class:`LayerCosts`.
    """

    name: str
    """The module's class name, for people."""
    forward_seconds: SECONDS
    backward_seconds: SECONDS
    parameter_bytes: NUM_BYTES
    output_bytes: NUM_BYTES
    """What it hands to the next layer for one micro-batch."""
    saved_bytes: NUM_BYTES = 0
    parameter_tensors: int = Field(default=1, ge=0)
    sizes: tuple[AtSize, ...] = ()
    """The same at other micro-batch sizes, rising."""


class LinkCost(Frozen):
    """One way between two devices."""

    latency_seconds: SECONDS
    bytes_per_second: BYTES_PER_SECOND

    def seconds(self, num_bytes: float) -> float:
        """One message on an idle link."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


class AllReduceCost(Frozen):
    """Summing over D ranks."""

    round_seconds: SECONDS
    bytes_per_second: BYTES_PER_SECOND

    def seconds(self, num_bytes: float, tensors: int, ranks: int) -> float:
        """``tensors`` buffers of ``num_bytes`` together."""
        rounds = 2 * (ranks - 1)
        return rounds * (self.round_seconds * tensors + num_bytes / ranks / self.bytes_per_second)


SPOT_LINK = LinkCost(latency_seconds=0.001, bytes_per_second=125e6)
"""A spot VM's ordinary network under load: what is assumed while nothing was measured."""


class Scatter(Frozen):
    """How single times vary around their mean."""

    compute: tuple[FINITE_POSITIVE, ...] = ()
    """Equally likely factors on a task's seconds, rising, of mean 1; none: not measured."""
    link: SECONDS = 0.0
    """Mean delay of a message, as a part of what it takes on an idle link."""


class MovingCost(Frozen):
    """How fast checkpoints go out and come back when a new generation begins."""

    write_bytes_per_second: BYTES_PER_SECOND = 100e6
    """Of one rank, durable."""
    load_bytes_per_second: BYTES_PER_SECOND = 400e6

    @model_validator(mode="before")
    @classmethod
    def _without_what_nobody_reads(cls, given: Any) -> Any:
        """Older files guessed how long forking and meeting take; every launch tells it."""
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if k not in ("fork_seconds", "rendezvous_seconds")}


class LayerCosts(Frozen):
    """All layers in order, and what lies between devices. Times are medians over a few passes."""

    version: int = Field(default=VERSION, ge=1, le=VERSION)
    micro_batch: int = Field(ge=1)
    layers: tuple[LayerCost, ...] = Field(min_length=1)
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that hold one and the same weight, the owner (the lowest index) first."""
    measured_seconds: FINITE_POSITIVE | None = None
    """How long measuring took."""
    task_seconds: SECONDS = 0.0
    """What a trainer adds to each task: its loop, handing over a message."""
    fetch_seconds: SECONDS = 0.0
    """Of one sample: the first stage fetches its input, the last one its labels."""
    optimizer_bytes_per_second: BYTES_PER_SECOND | None = None
    """Parameter bytes that a step applies a second; None: not measured, taken as no time."""
    state_copies: float = Field(default=4.0, ge=1)
    """Bytes a rank holds for each byte of parameters: itself, gradient, optimizer's state."""
    same_node: LinkCost | None = None
    cross_node: LinkCost | None = None
    """None: not measured."""
    all_reduce: AllReduceCost | None = None
    jitter: Scatter = Scatter()
    moving: MovingCost = MovingCost()
    program: str = ""
    """A hash of the program, its arguments and precision; empty: not known."""
    device_kind: str = ""
    host: str = ""
    """The machine that was measured, for people."""
    learned_at_step: int = 0
    """When steps last moved them; 0: as calibrated."""

    @model_validator(mode="after")
    def _ties_are_between_layers(self) -> Self:
        count = len(self.layers)
        if bad := [at for group in self.tied for at in group if not 0 <= at < count]:
            raise ValueError(f"tied weights name layer {bad[0]}, there are layers 0 to {count - 1}")
        return self

    def at_level(self, level: float, reducing: float, step: int) -> "LayerCosts":
        """All layers' seconds times ``level``, the sum of gradients' times ``reducing``."""
        one = self.reducing()
        return self.model_copy(
            update={
                "layers": tuple(_times(layer, level) for layer in self.layers),
                "all_reduce": AllReduceCost(
                    round_seconds=one.round_seconds * reducing,
                    bytes_per_second=one.bytes_per_second / reducing,
                ),
                "learned_at_step": step,
            }
        )

    def link(self, *, within_node: bool) -> LinkCost:
        """The best that is known of that class."""
        first, second = self.same_node, self.cross_node
        if not within_node:
            first, second = second, first
        return first or second or SPOT_LINK

    def reducing(self) -> AllReduceCost:
        """The measured all-reduce, or what the link between nodes lets expect."""
        if self.all_reduce:
            return self.all_reduce
        link = self.link(within_node=False)
        return AllReduceCost(
            round_seconds=link.latency_seconds, bytes_per_second=link.bytes_per_second
        )

    def at(self, micro_batch: int) -> tuple[AtSize, ...]:
        """Every layer at that size: as measured, between two measured sizes on the line through
        them, beyond them in proportion.
        """
        return tuple(self._layer_at(layer, micro_batch) for layer in self.layers)

    def _layer_at(self, layer: LayerCost, micro_batch: int) -> AtSize:
        base = AtSize(
            micro_batch=self.micro_batch,
            forward_seconds=layer.forward_seconds,
            backward_seconds=layer.backward_seconds,
            saved_bytes=layer.saved_bytes,
        )
        known = sorted({one.micro_batch: one for one in (*layer.sizes, base)}.items())
        sizes = [size for size, _ in known]
        right = bisect_left(sizes, micro_batch)
        if right < len(sizes) and sizes[right] == micro_batch:
            return known[right][1]
        if 0 < right < len(sizes):
            return _between(known[right - 1][1], known[right][1], micro_batch)
        nearest = known[0 if right == 0 else -1][1]
        return _scaled(nearest, micro_batch)


def _times(layer: LayerCost, level: float) -> LayerCost:
    def lifted(one: AtSize) -> AtSize:
        update = {
            "forward_seconds": one.forward_seconds * level,
            "backward_seconds": one.backward_seconds * level,
        }
        return one.model_copy(update=update)

    return layer.model_copy(
        update={
            "forward_seconds": layer.forward_seconds * level,
            "backward_seconds": layer.backward_seconds * level,
            "sizes": tuple(map(lifted, layer.sizes)),
        }
    )


def _between(low: AtSize, high: AtSize, micro_batch: int) -> AtSize:
    part = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def of(a: float, b: float) -> float:
        return a + part * (b - a)

    return AtSize(
        micro_batch=micro_batch,
        forward_seconds=of(low.forward_seconds, high.forward_seconds),
        backward_seconds=of(low.backward_seconds, high.backward_seconds),
        saved_bytes=round(of(low.saved_bytes, high.saved_bytes)),
    )


def _scaled(one: AtSize, micro_batch: int) -> AtSize:
    by = micro_batch / one.micro_batch
    return AtSize(
        micro_batch=micro_batch,
        forward_seconds=one.forward_seconds * by,
        backward_seconds=one.backward_seconds * by,
        saved_bytes=round(one.saved_bytes * by),
    )
