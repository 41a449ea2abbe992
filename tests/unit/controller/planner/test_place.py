"""Who sits where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.planner.place import place


def test_one_device_a_node_is_filled_in_order() -> None:
    assert place(2, 2, [1, 1, 1, 1, 1]) == ((0, 0), (1, 0), (2, 0), (3, 0))


def test_a_replica_that_fits_on_a_node_sits_on_one_and_replicas_sit_apart() -> None:
    spots = place(2, 2, [4, 4])
    assert [node for node, _ in spots] == [0, 0, 1, 1]


def test_a_replica_keeps_to_one_node_where_another_order_would_split_it() -> None:
    spots = place(3, 2, [4, 4])
    assert [node for node, _ in spots] == [0, 0, 0, 1, 1, 1]


def test_a_long_pipeline_takes_node_by_node() -> None:
    assert [node for node, _ in place(6, 1, [4, 4])] == [0, 0, 0, 0, 1, 1]


@given(depth=st.integers(1, 5), replicas=st.integers(1, 5), devices=st.lists(st.integers(1, 4)))
def test_every_rank_has_a_device_of_its_own(depth: int, replicas: int, devices: list[int]) -> None:
    if depth * replicas > sum(devices):
        with pytest.raises(ValueError, match="do not fit"):
            place(depth, replicas, devices)
        return
    spots = place(depth, replicas, devices)
    assert len(spots) == len(set(spots)) == depth * replicas
    assert all(0 <= device < devices[node] for node, device in spots)
