"""Which samples a micro-batch gets, and that random datasets give the same ones everywhere."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch

from trainer.contract.samples import expected_hash, hash_of, mix32, sample_at
from trainer.contract.spec import Shape, Training
from trainer.contract.topology import MicroBatch, micro_batches
from trainer.data import Batches, HeldOut, same_data
from trainer.program import ProgramError
from trainer.replicas import Totals

pytestmark = pytest.mark.integration

TRAINING = Training(batch_size=10, steps=5, seed=7)


def test_the_sum_of_sample_ids_is_exact_in_a_ballot_however_large_the_batch() -> None:
    total = sum(map(mix32, range(1000))) + 2**60
    row = Totals(ids=total).in_a_row(())
    assert hash_of(int(float(row[3]))) == hash_of(total)


class Drawn:
    """Each sample is drawn from all three generators."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {
            "id": index,
            "python": random.random(),
            "numpy": numpy.random.rand(2),
            "torch": torch.rand(3),
        }


def step_of(shape: Shape, step: int, training: Training = TRAINING) -> list[dict[str, Any]]:
    """All samples of a step as the ranks of ``shape`` fetch them, by position."""
    batches = Batches(Drawn(), training)
    rows = []
    for mine in micro_batches(training.batch_size, shape):
        for micro_batch in mine:
            batch = batches.fetch(step, micro_batch)
            assert batch.tensors["id"].tolist() == list(batch.ids)
            for row in range(micro_batch.size):
                rows.append({key: t[row].tolist() for key, t in batch.tensors.items()})
    return rows


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_shape_gets_the_same_samples_in_the_same_order(step: int) -> None:
    one = step_of(Shape(depth=1, replicas=1, micro_batch=10), step)
    assert step_of(Shape(depth=4, replicas=2, micro_batch=4), step) == one
    assert step_of(Shape(depth=1, replicas=3, micro_batch=3), step) == one
    assert [row["id"] for row in one] == [sample_at((step - 1) * 10 + i, 13, 7) for i in range(10)]


def test_a_sample_is_drawn_anew_in_the_next_epoch_and_with_another_seed() -> None:
    shape = Shape(depth=1, replicas=1, micro_batch=10)
    rows = step_of(shape, 1) + step_of(shape, 2)
    assert len({row["python"] for row in rows}) == len(rows)
    other = step_of(shape, 1, TRAINING.model_copy(update={"seed": 8}))
    assert {row["python"] for row in other}.isdisjoint({row["python"] for row in rows})


def test_fetching_leaves_the_generators_as_they_were() -> None:
    def drawn_after(fetches: int) -> list[float]:
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
        for _ in range(fetches):
            Batches(Drawn(), TRAINING).fetch(1, MicroBatch(0, 0, 4))
        return [random.random(), numpy.random.rand(), torch.rand(1).item()]

    assert drawn_after(2) == drawn_after(0)


def test_the_last_micro_batch_may_be_short_and_the_ids_prove_the_step() -> None:
    batches = Batches(Drawn(), TRAINING)
    (mine,) = micro_batches(10, Shape(depth=1, replicas=1, micro_batch=4))
    ids = [i for micro_batch in mine for i in batches.fetch(2, micro_batch).ids]
    assert batches.fetch(2, mine[-1]).tensors["torch"].shape == (2, 3)
    assert hash_of(sum(mix32(i) for i in ids)) == expected_hash(2, 10, 13, 7)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], r"\(3,\).*samples must be alike"),
        ([{"x": 1}, {"x": 1.5}], "samples must be alike"),
        ([{"x": 1}, {"y": 1}], r"has the keys \['y'\]"),
        ([{"x": "a"}, {"x": "b"}], r"\['x'\] is a str, not a tensor"),
        ([{"x": None}, {"x": None}], r"\['x'\] is a NoneType, not a tensor"),
    ],
)
def test_samples_that_do_not_stack_are_named(samples: Any, message: str) -> None:
    batches = Batches(samples, Training(batch_size=2, steps=1))
    with pytest.raises(ProgramError, match=rf"^dataset\[[01]\].*{message}"):
        batches.fetch(1, MicroBatch(0, 0, 2))
    with pytest.raises(ProgramError, match=rf"^eval_dataset\[[01]\].*{message}"):
        HeldOut(samples, seed=0).fetch(MicroBatch(0, 0, 2))


def test_a_checkpoint_of_other_data_is_refused_in_words() -> None:
    position = Batches(Drawn(), TRAINING).position
    same_data(position, position)
    with pytest.raises(ProgramError, match="made with a dataset of 14 samples, this run has a dat"):
        same_data(position.model_copy(update={"samples": 14}), position)
    with pytest.raises(ProgramError, match="made with batch_size 8, this run has batch_size 10"):
        same_data(position.model_copy(update={"batch_size": 8}), position)
