"""Which hops stay on a node, for nodes of equal device counts. PURE.

Consecutive stages sit together. A pipeline no longer than a node's devices stays on one node, if
there are enough nodes for all replicas to do so; else some replica straddles two, and that one
counts. Whom it really falls to is :mod:`controller.planner.place`'s business.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Spots:
    """From ``devices`` devices on, the slowest replica's hops can be so."""

    devices: int
    within_node: tuple[bool, ...]


@lru_cache(maxsize=4096)
def spots(depth: int, replicas: int, per_node: int) -> tuple[Spots, ...]:
    """The ways to seat a shape, the one that needs fewest devices first."""
    world = depth * replicas
    apart = tuple(_hops(0, depth, per_node))
    if per_node == 1 or depth > per_node:
        return (Spots(world, apart),)
    fit = per_node // depth
    roomy = replicas // fit * per_node + replicas % fit * depth
    together = Spots(roomy, (True,) * (depth - 1))
    starts = (replica * depth for replica in range(replicas))
    straddling = next((s for s in starts if not all(_hops(s, depth, per_node))), None)
    if straddling is None:
        return (together,)
    return (Spots(world, tuple(_hops(straddling, depth, per_node))), together)


def _hops(start: int, depth: int, per_node: int) -> Iterator[bool]:
    """Of a pipeline whose first stage sits on device ``start``, nodes filled one after another."""
    return (bool((start + stage) % per_node) for stage in range(1, depth))
