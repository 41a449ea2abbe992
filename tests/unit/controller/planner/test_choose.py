"""The planner's choice, its sentence and its refusals."""

from itertools import pairwise

import pytest

from controller.planner.choose import Choice, Depths, NoPlan, choose
from controller.planner.estimate import Link, balanced_cuts, step_seconds
from controller.planner.shapes import auto_micro_batch, shapes
from tests.unit.controller.builders import costs_of
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import Shape
from trainer.contract.topology import check_cuts, micro_batches

FREE = Link(latency_seconds=0.0, bytes_per_second=float("inf"))


def chosen(costs: LayerCosts, devices: int, batch_size: int = 32, **more: object) -> Choice:
    found = choose(costs, devices, batch_size, 4, **more)  # type: ignore[arg-type]
    assert isinstance(found, Choice), found
    return found


def refused(costs: LayerCosts, devices: int, batch_size: int = 32, **more: object) -> NoPlan:
    found = choose(costs, devices, batch_size, 4, **more)  # type: ignore[arg-type]
    assert isinstance(found, NoPlan), found
    return found


@pytest.mark.parametrize(
    ("depth", "count", "ticks"),
    [(4, 5, 27), (2, 8, 33), (4, 8, 39), (4, 32, 135), (8, 32, 147), (16, 128, 555)],
)
def test_the_estimate_is_within_a_tick_of_the_schedule(depth: int, count: int, ticks: int) -> None:
    """F = R = 1, B = 2: the lengths of engine.md, section 3."""
    costs = costs_of(depth, forward=1.0, backward=2.0)
    shape = Shape(depth=depth, replicas=1, micro_batch=4)
    found = step_seconds(costs, shape, balanced_cuts(costs, depth), count * 4, FREE)
    assert abs(found - ticks) <= 1


@pytest.mark.parametrize("devices", range(1, 10))
@pytest.mark.parametrize("layers", [1, 2, 5, 9])
@pytest.mark.parametrize("batch_size", [1, 4, 9, 24])
def test_a_choice_can_be_seated_cut_and_dealt(devices: int, layers: int, batch_size: int) -> None:
    found = chosen(costs_of(layers), devices, batch_size)

    assert found.shape.world <= devices
    check_cuts(found.cuts, layers, found.shape.depth)
    assert len(micro_batches(batch_size, found.shape)) == found.shape.replicas


def test_slow_links_favour_stages_and_fast_ones_replicas() -> None:
    costs = costs_of(6, parameter_bytes=4_000_000, output_bytes=10_000)
    slow = chosen(costs, 8, link=Link(0.001, 5e6))
    fast = chosen(costs, 8, link=FREE)

    assert slow.shape.depth > fast.shape.depth
    assert str(fast.shape) == "1x8"


def test_between_equals_fewer_stages_and_devices_win() -> None:
    nothing = costs_of(4, forward=0.0, backward=0.0, parameter_bytes=0, output_bytes=0)
    assert str(chosen(nothing, 8, link=FREE).shape) == "1x1"


def test_the_sentence_names_the_runner_up_and_the_spares() -> None:
    found = chosen(costs_of(3), 7, depths=Depths(3, 3))
    assert str(found.shape) == "3x2"
    assert "3x1 would take" in found.because
    assert found.because.endswith("1 of 7 devices stay spare.")
    assert [str(c.shape) for c in found.runners_up] == ["3x1"]


def test_unmeasured_layers_are_cut_by_their_bytes() -> None:
    costs = costs_of(4, forward=0.0, backward=0.0)
    heavy = costs.layers[0].model_copy(update={"parameter_bytes": 10**9})
    costs = costs.model_copy(update={"layers": (heavy, *costs.layers[1:])})
    assert balanced_cuts(costs, 2) == (0, 1, 4)


def test_more_stages_than_layers_is_hopeless_and_says_the_mend() -> None:
    found = refused(costs_of(4), 8, depths=Depths(6, 8))
    assert found.hopeless
    assert "4 layers" in found.because and "at most 4" in found.because


def test_more_stages_than_devices_waits_for_devices() -> None:
    found = refused(costs_of(8), 4, depths=Depths(6))
    assert not found.hopeless
    assert "there are 4 devices" in found.because


def test_what_no_device_can_hold_is_refused_with_bytes() -> None:
    big = costs_of(2, parameter_bytes=3_000_000_000)
    found = refused(big, 8, device_memory_bytes=8_000_000_000)
    assert found.hopeless
    assert "needs 12.0 GB, the smallest device has 8.0 GB" in found.because

    more_would_do = refused(big, 1, device_memory_bytes=13_000_000_000)
    assert not more_would_do.hopeless


def test_memory_pushes_to_a_deeper_pipeline() -> None:
    costs = costs_of(4, parameter_bytes=1_000_000_000)
    found = chosen(costs, 4, device_memory_bytes=5_000_000_000)
    assert found.shape.depth == 4


def test_every_shape_fits_and_none_starves_a_replica() -> None:
    found = [str(s) for s in shapes(layers=3, devices=4, batch_size=8, micro_batch=4)]
    assert found == ["1x1", "1x2", "2x1", "2x2", "3x1"]


@pytest.mark.parametrize(
    ("batch_size", "fewest_nodes", "micro_batch"),
    [(32, 2, 4), (64, 2, 4), (24, 2, 2), (1, 1, 1), (3, 8, 1), (8, 1, 2), (1000, 1, 4)],
)
def test_the_auto_micro_batch_depends_on_batch_and_fewest_nodes_only(
    batch_size: int, fewest_nodes: int, micro_batch: int
) -> None:
    assert auto_micro_batch(batch_size, fewest_nodes) == micro_batch


def test_cuts_put_every_layer_on_one_stage() -> None:
    cuts = balanced_cuts(costs_of(9), 4)
    assert sum(b - a for a, b in pairwise(cuts)) == 9
