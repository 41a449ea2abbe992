"""Costs as they are stored, old ones too, and what they say of sizes and links not measured."""

import pytest

from trainer.contract.costs import SPOT_LINK, AllReduceCost, AtSize, LayerCost, LayerCosts, LinkCost

OLD = {
    "version": 1,
    "micro_batch": 4,
    "layers": [
        {"name": "Block", "forward_seconds": 0.1, "backward_seconds": 0.2,
         "parameter_bytes": 100, "output_bytes": 40},
    ],
    "tied": [[0]],
    "measured_seconds": 1.5,
    "moving": {"fork_seconds": 0.5, "rendezvous_seconds": 0.4, "load_bytes_per_second": 7.0},
}  # fmt: skip


def test_costs_of_the_first_version_are_still_read() -> None:
    costs = LayerCosts.model_validate(OLD)
    assert costs.layers[0].forward_seconds == 0.1
    assert costs.moving.load_bytes_per_second == 7.0
    assert costs.link(within_node=True) == costs.link(within_node=False) == SPOT_LINK
    assert costs.reducing().round_seconds == SPOT_LINK.latency_seconds
    assert LayerCosts.model_validate(costs.model_dump(mode="json")) == costs


def test_costs_of_a_version_to_come_are_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        LayerCosts.model_validate({**OLD, "version": 3})


def measured() -> LayerCosts:
    one = AtSize(micro_batch=1, forward_seconds=1.0, backward_seconds=2.0, saved_bytes=10)
    layer = LayerCost(
        name="Block", forward_seconds=3.0, backward_seconds=6.0, parameter_bytes=0,
        output_bytes=0, saved_bytes=50, sizes=(one,),
    )  # fmt: skip
    return LayerCosts(micro_batch=5, layers=(layer,))


@pytest.mark.parametrize(
    ("micro_batch", "forward", "saved"), [(1, 1.0, 10), (5, 3.0, 50), (3, 2.0, 30), (10, 6.0, 100)]
)
def test_a_size_between_two_lies_on_their_line_and_one_beyond_is_in_proportion(
    micro_batch: int, forward: float, saved: int
) -> None:
    (found,) = measured().at(micro_batch)
    assert found.micro_batch == micro_batch
    assert found.forward_seconds == pytest.approx(forward)
    assert found.backward_seconds == pytest.approx(2 * forward)
    assert found.saved_bytes == saved


def test_a_class_of_link_that_was_not_measured_is_taken_for_the_other() -> None:
    near = LinkCost(latency_seconds=1e-5, bytes_per_second=1e9)
    costs = measured().model_copy(update={"same_node": near})
    assert costs.link(within_node=False) == near


def test_summing_over_replicas_takes_rounds_and_each_byte_almost_twice() -> None:
    cost = AllReduceCost(round_seconds=0.001, bytes_per_second=1000.0)
    assert cost.seconds(1000, 1, 1) == 0
    assert cost.seconds(1000, 1, 2) == pytest.approx(2 * 0.001 + 1.0)
    assert cost.seconds(0, 3, 4) == pytest.approx(6 * 3 * 0.001)


def test_a_level_moves_all_sizes_and_the_sum_of_gradients_by_its_own() -> None:
    costs = measured().at_level(2.0, 3.0, step=70)
    assert (costs.at(1)[0].forward_seconds, costs.at(5)[0].backward_seconds) == (2.0, 12.0)
    assert costs.reducing().round_seconds == pytest.approx(3 * SPOT_LINK.latency_seconds)
    assert costs.learned_at_step == 70
