"""`builtin:bert`: hidden bytes are restored, the same ones at every shape."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.trainers import Trainers
from tests.integration.test_trainer_numbers import Job, farthest
from trainer.contract.builtins import layer_count
from trainer.contract.spec import Program, Training
from trainer.contract.topology import MicroBatch
from trainer.data import Batch, Batches
from trainer.models.bert import MASK, VOCAB
from trainer.program import LoadedProgram, ProgramError, load

pytestmark = pytest.mark.integration

SMALL = {"layers": 4, "width": 32, "heads": 4, "context": 64}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"To be, or not to be, that is the question:\n" * 200)
    return path


def bert(text: Path, /, **args: Any) -> LoadedProgram:
    return load(Program(source="builtin:bert", args=SMALL | {"text": str(text)} | args))


def batch(program: LoadedProgram, step: int = 1, size: int = 32, seed: int = 0) -> Batch:
    batches = Batches(program.dataset, Training(batch_size=size, steps=9, seed=seed))
    return batches.fetch(step, MicroBatch(0, 0, size))


def test_one_place_in_seven_is_asked_for_and_most_of_those_are_hidden(text: Path) -> None:
    found = batch(bert(text), size=128).tensors
    asked = found["targets"] >= 0
    assert 0.13 < asked.float().mean() < 0.17
    assert asked.any(dim=1).all()
    shown, wanted = found["tokens"][asked], found["targets"][asked]
    assert 0.75 < (shown == MASK).float().mean() < 0.85
    assert 0.06 < (shown == wanted).float().mean() < 0.14
    assert not (found["tokens"][~asked] == MASK).any()


def test_a_sample_without_luck_is_asked_for_one_place(text: Path) -> None:
    asked = batch(bert(text, masked=1e-9)).tensors["targets"] >= 0
    assert asked.sum(dim=1).tolist() == [1] * 32


def test_what_is_hidden_depends_on_the_seed_and_the_place_in_the_order_alone(text: Path) -> None:
    program = bert(text)
    again = batch(bert(text)).tensors
    first = batch(program).tensors
    torch.manual_seed(7)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = batch(program, seed=1).tensors
    assert not torch.equal(first["targets"] >= 0, other["targets"] >= 0)


def test_the_next_epoch_hides_other_places_of_the_same_text(text: Path) -> None:
    program = bert(text)
    count = len(program.dataset)
    one, two = (batch(program, step, count) for step in (1, 2))
    assert sorted(one.ids) == sorted(two.ids) == list(range(count))
    place = two.ids.index(one.ids[0])
    assert not torch.equal(one.tensors["targets"][0] >= 0, two.tensors["targets"][place] >= 0)


def test_the_loss_is_over_what_was_asked_for_alone(text: Path) -> None:
    program = bert(text, masked=0.5)
    found = batch(program).tensors
    output = torch.randn(32, 64, VOCAB)
    asked = found["targets"] >= 0
    loss = program.loss(output, found)
    assert loss.weight == asked.sum()
    assert loss.metrics["accuracy"][1] == loss.weight
    changed = torch.where(asked[..., None], output, output + 1)
    assert program.loss(changed, found).sum == loss.sum


def test_a_hidden_byte_is_guessed_from_both_sides(text: Path) -> None:
    program = bert(text, dropout=0.0)
    torch.manual_seed(0)
    layers = program.layers()
    assert len(layers) == layer_count("bert", SMALL) == 6
    assert layers[-1].weight is layers[0][0].tokens  # type: ignore[index]

    def run(tokens: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            tokens = layer(tokens)
        return tokens

    tokens = batch(program).tensors["tokens"][:1]
    for place in (3, 60):
        other = tokens.clone()
        other[0, place] = 5
        assert not torch.allclose(run(tokens)[0, 30], run(other)[0, 30])


def test_a_part_to_hide_that_is_none_is_refused(text: Path) -> None:
    with pytest.raises(ProgramError, match="masked is a part between 0 and 1, not 15"):
        bert(text, masked=15).layers()


def test_it_learns_alike_at_every_shape_with_dropout_and_a_tied_decoder(
    trainers: Trainers, tmp_path: Path, text: Path
) -> None:
    args = SMALL | {"text": str(text), "dropout": 0.1, "lr": 3e-3, "warmup": 5}
    root = tmp_path / "job"
    job = Job(trainers, root, "builtin:bert", args=args, batch_size=16, steps=12, clip_grad_norm=1)
    alone = job.curve(1, 1)
    assert alone[0][0] == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.3)
    assert alone[-1][0] is not None and alone[-1][0] < 5.0
    assert job.curve(3, 1) == alone
    assert farthest(job.curve(2, 2), alone) < 1e-5
    assert farthest(job.curve(1, 1, m=3), alone) < 1e-5
