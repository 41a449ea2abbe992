"""Which nodes do not reach each other, and whom to leave out. PURE.

When launches come to nothing though every VM answers, the nodes of the next one are told to connect
to each other before it: a bad path between two VMs is seen by nobody else. One of a bad pair is set
aside, the one in most such pairs.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from controller.core.budget import strain
from controller.core.states import Reason
from controller.core.words import listed
from controller.core.world import EndedGeneration, Node

Paths = Sequence[tuple[str, tuple[str, ...] | None]]
"""(node, whom it does not reach; None: it has not said)."""
_STUCK = 2


def are_doubtful(past: Sequence[EndedGeneration]) -> bool:
    """Whether the paths between nodes should be tried before the next launch."""
    last = next((g for g in reversed(past) if g.launched), None)
    if last is None or last.blamed is not None:
        return False
    broke = last.reason in (Reason.BAD_PATH_BETWEEN_NODES, Reason.HANG)
    return broke or (not last.charged and strain(past).stuck >= _STUCK)


def are_told(paths: Paths, nodes: Sequence[Node]) -> bool:
    """Whether all of ``nodes`` that were asked have said whom they reach."""
    names = {node.name for node in nodes}
    return all(found is not None for name, found in paths if name in names)


def worst(paths: Paths, nodes: Sequence[Node]) -> tuple[Node, list[str]] | None:
    """Of ``nodes``, whom to leave out, and whom it does not reach; None: all reach each other."""
    names = [node.name for node in nodes]
    bad = bad_pairs(paths, names)
    if not bad:
        return None
    often = Counter(name for pair in bad for name in pair)
    name = max(often, key=lambda name: (often[name], names.index(name)))
    others = sorted({other for pair in bad if name in pair for other in pair if other != name})
    node = next(node for node in nodes if node.name == name)
    return node, others


def because(node: Node, unreached: Sequence[str]) -> str:
    """A sentence's first half."""
    return f"{node.name} has no path to {listed(unreached)}"


def bad_pairs(paths: Paths, names: Collection[str]) -> set[frozenset[str]]:
    """Pairs of ``names`` of which one said that it does not reach the other."""
    return {
        frozenset((name, other))
        for name, unreached in paths
        for other in unreached or ()
        if name in names and other in names
    }
