"""Who sits where: replicas apart by zone, slow nodes last."""

from collections import defaultdict

import pytest

from controller.core.seating import in_seating_order, seats
from controller.core.states import NodeState
from controller.core.world import Node, Slowness
from tests.unit.controller.builders import job
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat


def node(name: str, zone: str | None = None, *, devices: int = 1, slow: float = 0.0) -> Node:
    return Node(
        name=name,
        incarnation=f"{name}#1",
        state=NodeState.READY,
        devices=devices,
        device_kind="cpu",
        device_memory_bytes=0,
        data_host="127.0.0.1",
        store_port=1,
        heard_at=0.0,
        zone=zone,
        slow=Slowness(slow, 0.0) if slow else None,
    )


def in_zones(*counts: int, devices: int = 1) -> list[Node]:
    """So many nodes in each zone, of names that mix them."""
    made = [
        node(f"{n}{zone}", f"zone-{zone}", devices=devices)
        for zone, count in enumerate(counts)
        for n in range(count)
    ]
    return sorted(made, key=lambda one: one.name)


def seated(depth: int, replicas: int, nodes: list[Node]) -> list[Node]:
    """By rank."""
    slow = {(n.name, n.incarnation): n.slow.factor for n in nodes if n.slow}
    shape, by_name = (
        Shape(depth=depth, replicas=replicas, micro_batch=1),
        {n.name: n for n in nodes},
    )
    ordered = in_seating_order(job(), nodes, depth, slow)
    return [by_name[seat.node] for seat in seats(job(), ordered, shape, slow)]


def zones(depth: int, replicas: int, nodes: list[Node]) -> list[set[str | None]]:
    """Of each stage, the zones that hold it."""
    found: dict[int, set[str | None]] = defaultdict(set)
    shape = Shape(depth=depth, replicas=replicas, micro_batch=1)
    for rank, one in enumerate(seated(depth, replicas, nodes)):
        found[Seat.of(rank, shape).stage].add(one.zone)
    return [found[stage] for stage in range(depth)]


@pytest.mark.parametrize(
    ("depth", "replicas", "counts"),
    [(1, 2, (2, 2)), (2, 2, (2, 2)), (2, 2, (3, 3)), (2, 2, (4, 2)), (3, 2, (3, 5)),
     (2, 3, (2, 2, 2)), (2, 4, (4, 4)), (1, 3, (5, 1))],
)  # fmt: skip
def test_the_loss_of_a_zone_leaves_every_stage_alive(
    depth: int, replicas: int, counts: tuple[int, ...]
) -> None:
    assert all(len(held) > 1 for held in zones(depth, replicas, in_zones(*counts)))


def test_a_replica_keeps_to_one_zone() -> None:
    found = seated(3, 2, in_zones(3, 3))
    assert len({one.zone for one in found[:3]}) == len({one.zone for one in found[3:]}) == 1


@pytest.mark.parametrize(("depth", "replicas"), [(2, 2), (2, 4), (4, 2)])
def test_replicas_on_nodes_of_four_devices_sit_in_both_zones(depth: int, replicas: int) -> None:
    nodes = in_zones(2, 2, devices=4)
    assert all(len(held) == 2 for held in zones(depth, replicas, nodes))
    found = seated(depth, replicas, nodes)
    for replica in range(replicas):
        assert len({one.name for one in found[replica * depth : (replica + 1) * depth]}) == 1


def test_nodes_whose_zone_nobody_knows_are_taken_in_their_order() -> None:
    nodes = [node(f"vm-{i}") for i in range(5)]
    assert [one.name for one in seated(2, 2, nodes)] == ["vm-0", "vm-1", "vm-2", "vm-3"]


def test_slow_nodes_stand_last_the_least_slow_first_and_stay_spare_if_they_can() -> None:
    nodes = [node("a", slow=2.0), node("b"), node("c", slow=1.5), node("d"), node("e")]
    assert [one.name for one in seated(2, 2, nodes)] == ["b", "d", "e", "c"]
    assert [one.name for one in seated(3, 1, nodes)] == ["b", "d", "e"]


def test_a_slow_node_of_several_devices_is_left_alone_where_the_others_have_enough() -> None:
    nodes = [node("a", devices=4, slow=2.0), node("b", devices=4), node("c", devices=4)]
    assert {one.name for one in seated(2, 4, nodes)} == {"b", "c"}
