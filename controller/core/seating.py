"""Who sits where: on which devices of which nodes a shape's ranks are. PURE.

A replica's stages sit together, in one zone if they can; replicas sit apart, zone by zone, so that
what takes a node, or a zone, leaves every stage alive somewhere. Slow nodes stand last: they get a
pipeline's last stage, or nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.core.actions import SeatAt
from controller.core.world import Job, Node
from controller.planner.place import place
from trainer.contract.spec import Shape

MOST_PROBING = 4
"""Ranks that measure together before the first launch."""
Slow = Mapping[tuple[str, str], float]
"""Nodes (incarnations) that are slow, and by what factor."""
NOBODY: Slow = {}


def is_slow(node: Node) -> bool:
    """Whether it is, as far as is known."""
    return node.slow is not None and not node.slow.is_over


def slow_among(nodes: Iterable[Node]) -> dict[tuple[str, str], float]:
    """Who of them is slow, and by what factor."""
    slow = (node for node in nodes if is_slow(node))
    return {(n.name, n.incarnation): n.slow.factor for n in slow if n.slow}


def devices_of(job: Job, node: Node) -> int:
    """How many of its devices ``job`` uses."""
    wanted = job.spec.devices_per_node
    return node.devices if wanted == "auto" else min(wanted, node.devices)


def seats(job: Job, nodes: Sequence[Node], shape: Shape, slow: Slow = NOBODY) -> tuple[SeatAt, ...]:
    """Rank by rank over the nodes' devices; of slow nodes no more than it takes."""
    used = list(nodes)
    while (used[-1].name, used[-1].incarnation) in slow:
        if sum(devices_of(job, node) for node in used[:-1]) < shape.world:
            break
        used.pop()
    spots = place(shape.depth, shape.replicas, [devices_of(job, node) for node in used])
    return tuple(SeatAt(used[n].name, used[n].incarnation, device) for n, device in spots)


def in_seating_order(
    job: Job,
    nodes: Sequence[Node],
    depth: int,
    slow: Slow = NOBODY,
    aside: Collection[Node] = (),
) -> tuple[Node, ...]:
    """Zone after zone, of each as many nodes as a replica of ``depth`` stages takes, over and over;
    then who is set ``aside``; the slow ones last, the least slow first.
    """
    factors = {node: slow.get((node.name, node.incarnation), 0.0) for node in nodes}
    zones: dict[str | None, list[Node]] = {}
    for node in nodes:
        if not factors[node] and node not in aside:
            zones.setdefault(node.zone, []).append(node)
    a_replica = -(-depth // min(devices_of(job, node) for node in nodes))
    ordered: list[Node] = []
    while any(len(zone) >= a_replica for zone in zones.values()):
        for zone in zones.values():
            if len(zone) >= a_replica:
                ordered += zone[:a_replica]
                del zone[:a_replica]
    ordered += (node for zone in zones.values() for node in zone)
    last = [node for node in nodes if factors[node] or node in aside]
    return (*ordered, *sorted(last, key=lambda node: (factors[node], node in aside)))


def probing_seats(job: Job, nodes: Sequence[Node]) -> tuple[SeatAt, ...]:
    """Who builds the model, first, and a few who help it measure links: a second device of its
    node, and other nodes.
    """
    builder, *others = nodes
    near = min(devices_of(job, builder), 2 if others else MOST_PROBING)
    places = [SeatAt(builder.name, builder.incarnation, device) for device in range(near)]
    places += [SeatAt(node.name, node.incarnation, 0) for node in others]
    return tuple(places[:MOST_PROBING])
