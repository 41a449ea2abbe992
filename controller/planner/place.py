"""Who sits where: the stages of a replica together, replicas of a stage apart. PURE.

    a replica that fits on one node sits on one, on that with fewest replicas so far
    one that does not takes devices node by node, so that most neighbours share a node

Nodes are taken in the given order: who is slow stands last and stays spare if it can.
"""

from collections.abc import Sequence

Spot = tuple[int, int]
"""A node, by its place in the order, and one of its devices."""


def place(depth: int, replicas: int, devices: Sequence[int]) -> tuple[Spot, ...]:
    """By rank (replica by replica, stage by stage); ``devices``: how many each node has.

    Raises ValueError when there are too few.
    """
    if depth * replicas > sum(devices):
        raise ValueError(f"{depth}x{replicas} ranks do not fit on {sum(devices)} devices")
    free = [list(range(count)) for count in devices]
    whole = [0] * len(devices)
    seated: list[Spot] = []
    for _ in range(replicas):
        roomy = [node for node, left in enumerate(free) if len(left) >= depth]
        if roomy:
            node = min(roomy, key=lambda node: (whole[node], node))
            whole[node] += 1
            seated += [(node, free[node].pop(0)) for _ in range(depth)]
            continue
        missing = depth
        for node, left in enumerate(free):
            taken = min(missing, len(left))
            seated += [(node, left.pop(0)) for _ in range(taken)]
            missing -= taken
    return tuple(seated)
