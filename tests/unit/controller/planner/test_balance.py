"""A cut hands every layer to one stage and is as even as any."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planner.balance import cut

WEIGHT = st.one_of(st.integers(0, 5).map(float), st.floats(0, 10))


def costliest(
    weights: tuple[float, ...],
    last: tuple[float, ...],
    cuts: tuple[int, ...],
    factors: Sequence[float],
) -> float:
    *front, end = pairwise(cuts)
    stages = [sum(weights[a:b]) for a, b in front] + [sum(last[end[0] : end[1]])]
    return max(cost * factor for cost, factor in zip(stages, factors, strict=True))


@settings(max_examples=200, deadline=None)
@given(layers=st.lists(st.tuples(WEIGHT, WEIGHT), min_size=1, max_size=9), data=st.data())
def test_the_cut_is_as_even_as_the_best_of_all_cuts(
    layers: list[tuple[float, float]], data: st.DataObject
) -> None:
    weights = tuple(w + more for w, more in layers)
    last = tuple(w for w, _ in layers)
    depth = data.draw(st.integers(1, len(layers)))
    given_ = data.draw(st.lists(st.floats(1, 4), min_size=depth, max_size=depth) | st.just([]))
    factors = given_ or [1.0] * depth
    every = [(0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), depth - 1)]
    best = min(costliest(weights, last, cuts, factors) for cuts in every)

    found = cut(weights, last, depth, given_)

    assert found in every
    assert costliest(weights, last, found, factors) == pytest.approx(best)


@pytest.mark.parametrize("depth", [0, 4])
def test_three_layers_are_not_cut_into(depth: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        cut([1.0] * 3, [1.0] * 3, depth)


@pytest.mark.parametrize("layers", range(1, 10))
def test_no_layer_is_dropped_at_any_depth(layers: int) -> None:
    for depth in range(1, layers + 1):
        cuts = cut([1.0] * layers, [1.0] * layers, depth)
        assert cuts[0] == 0 and cuts[-1] == layers
        assert all(a < b for a, b in pairwise(cuts))
