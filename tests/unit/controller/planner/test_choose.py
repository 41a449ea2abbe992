"""The planner's choice, its sentence and its refusals."""

from itertools import pairwise
from typing import Any

import pytest

from controller.planner.choose import Choice, NoPlan, Planner, choose
from controller.planner.cutting import Model
from controller.planner.problem import Depths, Problem
from controller.planner.shapes import largest_micro_batch, levelled_micro_batch, shapes
from tests.unit.controller.builders import costs_of
from trainer.contract.costs import AtSize, LayerCosts, LinkCost
from trainer.contract.spec import Shape
from trainer.contract.topology import check_cuts, micro_batches

FREE = LinkCost(latency_seconds=0.0, bytes_per_second=1e30)


def problem(
    costs: LayerCosts, batch_size: int = 32, link: LinkCost | None = None, **more: Any
) -> Problem:
    return Problem(costs.model_copy(update={"cross_node": link}), batch_size, 4, **more)


def chosen(costs: LayerCosts, devices: int, batch_size: int = 32, **more: Any) -> Choice:
    found = choose(problem(costs, batch_size, **more), devices)
    assert isinstance(found, Choice), found
    return found


def refused(costs: LayerCosts, devices: int, batch_size: int = 32, **more: Any) -> NoPlan:
    found = choose(problem(costs, batch_size, **more), devices)
    assert isinstance(found, NoPlan), found
    return found


@pytest.mark.parametrize("devices", range(1, 10))
@pytest.mark.parametrize("layers", [1, 2, 5, 9])
@pytest.mark.parametrize("batch_size", [1, 4, 9, 24])
def test_a_choice_can_be_seated_cut_and_dealt(devices: int, layers: int, batch_size: int) -> None:
    found = chosen(costs_of(layers), devices, batch_size)

    assert found.shape.world <= devices
    check_cuts(found.cuts, layers, found.shape.depth)
    assert len(micro_batches(batch_size, found.shape)) == found.shape.replicas
    assert len(found.in_flight) == found.shape.depth


def test_slow_links_favour_stages_and_fast_ones_replicas() -> None:
    costs = costs_of(6, parameter_bytes=4_000_000, output_bytes=10_000)
    slow = chosen(costs, 8, link=LinkCost(latency_seconds=0.001, bytes_per_second=5e6))
    fast = chosen(costs, 8, link=FREE)

    assert slow.shape.depth > fast.shape.depth
    assert str(fast.shape) == "1x8"


def test_between_equals_fewer_stages_and_devices_win() -> None:
    nothing = costs_of(4, forward=0.0, backward=0.0, parameter_bytes=0, output_bytes=0)
    assert str(chosen(nothing, 8, link=FREE).shape) == "1x1"


def test_the_sentence_names_the_runner_up_and_the_spares() -> None:
    found = chosen(costs_of(3), 7, depths=Depths(3, 3))
    assert str(found.shape) == "3x2"
    assert "3x1 would take at least" in found.because
    assert found.because.endswith("1 of 7 devices stays spare.")
    assert [str(c.shape) for c in found.runners_up] == ["3x1"]
    assert "busiest stage works" in found.runners_up[0].because


def test_unmeasured_layers_are_cut_by_their_bytes() -> None:
    costs = costs_of(4, forward=0.0, backward=0.0)
    heavy = costs.layers[0].model_copy(update={"parameter_bytes": 10**9})
    costs = costs.model_copy(update={"layers": (heavy, *costs.layers[1:])})
    assert Model(costs, 4).cutting(2).cuts == (0, 1, 4)


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
    ("batch_size", "fewest", "most", "micro_batch"),
    [(32, 2, 4, 4), (64, 2, None, 8), (24, 2, None, 2), (1, 1, 8, 1), (3, 8, 8, 1), (8, 1, None, 2),
     (1000, 1, None, 16), (32, 1, 8, 4), (32, 1, 64, 1)],
)  # fmt: skip
def test_the_largest_micro_batch_leaves_enough_for_a_pipeline_and_for_all_nodes(
    batch_size: int, fewest: int, most: int | None, micro_batch: int
) -> None:
    assert largest_micro_batch(batch_size, fewest, most) == micro_batch


@pytest.mark.parametrize(
    ("seconds", "largest", "expected"),
    [
        ({1: 4.0, 2: 4.5, 4: 5.0, 8: 6.0}, 8, 8),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 8, 1),
        ({1: 2.0, 2: 2.1, 4: 4.1, 8: 8.0}, 8, 2),
        ({1: 4.0, 2: 4.5, 4: 5.0, 8: 6.0}, 2, 2),
        ({4: 1.0}, 2, 2),
    ],
)
def test_the_micro_batch_is_the_smallest_at_which_a_sample_takes_no_less(
    seconds: dict[int, float], largest: int, expected: int
) -> None:
    *smaller, base = sorted(seconds)
    sizes = tuple(
        AtSize(micro_batch=m, forward_seconds=seconds[m], backward_seconds=2 * seconds[m])
        for m in smaller
    )
    costs = costs_of(3, seconds[base], 2 * seconds[base], micro_batch=base)
    layers = tuple(layer.model_copy(update={"sizes": sizes}) for layer in costs.layers)
    assert levelled_micro_batch(costs.model_copy(update={"layers": layers}), largest) == expected


def test_cuts_put_every_layer_on_one_stage() -> None:
    cuts = Model(costs_of(9), 4).cutting(4).cuts
    assert sum(b - a for a, b in pairwise(cuts)) == 9


@pytest.mark.parametrize("link", [FREE, None, LinkCost(latency_seconds=0.01, bytes_per_second=1e7)])
def test_the_choice_is_the_best_of_all_shapes(link: LinkCost | None) -> None:
    wanted = problem(costs_of(5), 44, link)
    planner = Planner(wanted)
    played = {
        str(shape): planner.seconds(shape, planner.model.cutting(shape.depth).cuts)
        for shape in shapes(layers=5, devices=12, batch_size=44, micro_batch=4)
    }
    found = planner.choose(12)
    assert isinstance(found, Choice)
    assert found.seconds == pytest.approx(min(played.values()))
    assert found.seconds == pytest.approx(played[str(found.shape)])


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("memory", [0, 60_000_000])
def test_more_devices_never_give_a_slower_plan(per_node: int, memory: int) -> None:
    costs = costs_of(9, parameter_bytes=8_000_000)
    wanted = problem(costs, 70, device_memory_bytes=memory, devices_per_node=per_node)
    planner, cold = Planner(wanted), Planner(wanted)
    found = [planner.choose(devices) for devices in range(1, 32)]
    assert found[::-1] == [cold.choose(devices) for devices in range(31, 0, -1)]
    seconds = [c.seconds for c in found if isinstance(c, Choice)]
    assert len(seconds) > 10
    assert all(after <= before for before, after in pairwise(seconds))
    refusals = [isinstance(c, NoPlan) for c in found]
    assert refusals == sorted(refusals, reverse=True)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 7, 11, 13])
@pytest.mark.parametrize("memory", [0, 40_000_000, 100_000_000])
def test_a_plan_never_passes_the_memory_that_there_is(devices: int, memory: int) -> None:
    costs = costs_of(7, parameter_bytes=6_000_000, output_bytes=900_000)
    found = choose(problem(costs, 64, device_memory_bytes=memory), devices)
    if isinstance(found, Choice):
        assert found.shape.world <= devices
        assert not memory or max(one.total for one in found.stages) <= memory
    else:
        assert "GB" in found.because or "device" in found.because


def test_where_memory_is_short_fewer_micro_batches_are_in_flight() -> None:
    costs = costs_of(4, parameter_bytes=6_000_000, output_bytes=3_000_000)
    roomy = chosen(costs, 4, 64, depths=Depths(4, 4))
    tight = chosen(costs, 4, 64, depths=Depths(4, 4), device_memory_bytes=68_000_000)
    assert roomy.in_flight == (9, 6, 3, 1)
    assert sum(tight.in_flight) < sum(roomy.in_flight)
    assert tight.seconds >= roomy.seconds


def test_a_longer_play_goes_on_as_it_has_long_gone() -> None:
    costs = costs_of(20)
    shape = Shape(depth=20, replicas=1, micro_batch=4)
    planner = Planner(problem(costs, 4 * 700))
    whole = Planner(problem(costs, 4 * 590))
    more = planner.seconds(shape, planner.model.cutting(20).cuts)
    less = whole.seconds(shape, whole.model.cutting(20).cuts)
    assert more == pytest.approx(less * 700 / 590, rel=0.03)


def _gpt(layers: int, hidden: int, context: int, memory: int) -> Problem:
    """Costs by FLOPs and bytes: 16-bit weights and gradients on the device, the optimizer's state
    on the host, 40 TFLOP/s, 10-Gbit links.
    """
    parameters = 12 * hidden * hidden
    forward = 2 * parameters * context / 40e12
    costs = costs_of(
        layers, forward, 2 * forward, 2 * parameters, 2 * context * hidden, micro_batch=1
    )
    link = LinkCost(latency_seconds=0.0005, bytes_per_second=1.0e9)
    saved = tuple(
        layer.model_copy(update={"saved_bytes": 34 * context * hidden}) for layer in costs.layers
    )
    costs = costs.model_copy(update={"layers": saved, "cross_node": link, "state_copies": 2.0})
    return Problem(costs, 512, 1, device_memory_bytes=memory)


def test_200_billion_parameters_fit_on_a_hundred_devices_of_16_gb_and_not_on_60() -> None:
    wanted = _gpt(layers=100, hidden=12_960, context=1024, memory=16 * 10**9)
    found = choose(wanted, 102)
    assert isinstance(found, Choice)
    assert str(found.shape) == "100x1"
    assert 8e9 < max(one.total for one in found.stages) <= 16e9
    refused = choose(wanted, 60)
    assert isinstance(refused, NoPlan) and not refused.hopeless
    assert "needs 17.3 GB, the smallest device has 16.0 GB" in refused.because
