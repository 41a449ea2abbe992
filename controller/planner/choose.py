"""The best shape for so many devices, its runners-up, and why. PURE.

Least estimated step time; ties go to fewer stages, then fewer devices. A first cut: the estimate is
a closed form on rough costs and one assumed link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.planner.estimate import Link, balanced_cuts, stage_bytes, step_seconds
from controller.planner.shapes import micro_batches, shapes
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import Shape

RUNNERS_UP = 3


@dataclass(frozen=True)
class Candidate:
    """A shape that fits, and what a step is thought to take."""

    shape: Shape
    cuts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The best candidate; ``because`` is one sentence."""

    shape: Shape
    cuts: tuple[int, ...]
    seconds: float
    because: str
    runners_up: tuple[Candidate, ...]


@dataclass(frozen=True)
class NoPlan:
    """Nothing fits; ``hopeless``: nor would it on any number of such devices."""

    because: str
    hopeless: bool


@dataclass(frozen=True)
class Depths:
    """The depths that the user allows; ``most`` None: no upper bound."""

    fewest: int = 1
    most: int | None = None

    def allow(self, depth: int) -> bool:
        """Whether ``depth`` is among them."""
        return self.fewest <= depth and (self.most is None or depth <= self.most)


def choose(
    costs: LayerCosts,
    devices: int,
    batch_size: int,
    micro_batch: int,
    *,
    depths: Depths = Depths(),
    device_memory_bytes: int = 0,
    link: Link = Link(),  # noqa: B008
) -> Choice | NoPlan:
    """Choose for ``devices`` equal devices; ``device_memory_bytes`` 0: unknown, not checked."""
    layers = len(costs.layers)
    if depths.fewest > layers:
        return NoPlan(
            f"No plan fits: plan.depth asks for at least {depths.fewest} stages, the program has"
            f" {layers} layers. Set plan.depth to at most {layers}.",
            hopeless=True,
        )
    if depths.fewest > devices:
        return NoPlan(
            f"No plan fits: plan.depth asks for at least {depths.fewest} stages, there are"
            f" {devices} devices.",
            hopeless=False,
        )
    allowed = [
        Candidate(shape, cuts, step_seconds(costs, shape, cuts, batch_size, link))
        for shape in shapes(layers, devices, batch_size, micro_batch)
        if depths.allow(shape.depth)
        for cuts in [balanced_cuts(costs, shape.depth)]
    ]
    fitting = [
        c
        for c in allowed
        if not device_memory_bytes or _most_bytes(costs, c, batch_size)[1] <= device_memory_bytes
    ]
    if not fitting:
        return _too_big(costs, allowed, batch_size, device_memory_bytes, depths)
    best, *others = sorted(fitting, key=lambda c: (c.seconds, c.shape.depth, c.shape.world))
    return Choice(
        best.shape,
        best.cuts,
        best.seconds,
        _because(best, others, devices, batch_size),
        tuple(others[:RUNNERS_UP]),
    )


def _because(best: Candidate, others: Sequence[Candidate], devices: int, batch_size: int) -> str:
    count = micro_batches(batch_size, best.shape.micro_batch)
    said = f"{best.shape} takes an estimated {_ms(best)} a step of {count} micro-batches"
    if others:
        said += f"; {others[0].shape} would take {_ms(others[0])}"
    spare = devices - best.shape.world
    return said + (f"; {spare} of {devices} devices stay spare." if spare else ".")


def _ms(candidate: Candidate) -> str:
    return f"{candidate.seconds * 1000:,.1f} ms"


def _most_bytes(costs: LayerCosts, candidate: Candidate, batch_size: int) -> tuple[int, int]:
    """The stage that holds most, and how much."""
    shape, cuts = candidate.shape, candidate.cuts
    held = [stage_bytes(costs, shape, cuts, s, batch_size) for s in range(shape.depth)]
    return max(enumerate(held), key=lambda stage: stage[1])


def _too_big(
    costs: LayerCosts,
    allowed: Sequence[Candidate],
    batch_size: int,
    memory: int,
    depths: Depths,
) -> NoPlan:
    """Say how near the leanest shape came, and what would help."""
    stage, need = min(
        (_most_bytes(costs, c, batch_size) for c in allowed), key=lambda fullest: fullest[1]
    )
    deepest = max(c.shape.depth for c in allowed)
    at_most = min(len(costs.layers), depths.most or len(costs.layers))
    mend = (
        f"More than {deepest} devices would allow more stages."
        if deepest < at_most
        else "Try a smaller plan.micro_batch, more layers to cut between, or larger devices."
    )
    return NoPlan(
        f"No plan fits: stage {stage} needs {need / 1e9:,.1f} GB, the smallest device has"
        f" {memory / 1e9:,.1f} GB. {mend}",
        hopeless=deepest == at_most,
    )
