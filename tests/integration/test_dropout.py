"""The mask is a function of where an element stands in the training, and of nothing else."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trainer import dropout
from trainer.dropout import Dropout, Place, dropped

pytestmark = pytest.mark.integration

SHAPE = torch.Size((8, 50, 40))


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    yield
    dropout.leave()


def mask(seed: int = 1, step: int = 2, layer: int = 3, first: int = 0, drawn: int = 0) -> Tensor:
    return dropped(Place(seed, step, layer, first, drawn), SHAPE, 0.25)


def test_a_sample_has_the_same_mask_in_every_micro_batch() -> None:
    assert torch.equal(mask(first=3)[:5], mask()[3:])


def test_anything_else_gives_another_mask() -> None:
    others = [mask(seed=2), mask(step=3), mask(layer=4), mask(drawn=1), mask(first=8)]
    for other in others:
        same = (other == mask()).double().mean().item()
        assert same == pytest.approx(0.25**2 + 0.75**2, abs=0.02)


def test_a_share_of_the_elements_of_each_sample_is_dropped() -> None:
    shares = mask().double().mean((1, 2)).tolist()
    assert shares == pytest.approx([0.25] * 8, abs=0.05)
    assert len(set(shares)) > 1


def test_the_layers_own_masks_differ_and_a_second_run_draws_them_again() -> None:
    layer, x = Dropout(0.5), torch.ones(SHAPE)
    runs = []
    for _ in range(2):
        dropout.enter(Place(1, 2, 3, 4))
        runs.append([layer(x), layer(x)])
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert set(runs[0][0].unique().tolist()) == {0.0, 2.0}


def test_it_drops_nothing_in_evaluation_and_is_ordinary_where_nobody_says_the_place() -> None:
    layer, x = Dropout(0.5), torch.ones(SHAPE)
    assert layer.eval()(x) is x
    assert set(layer.train()(x).unique().tolist()) == {0.0, 2.0}


def test_all_dropped_or_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout 1\.0"):
        Dropout(1.0)
