"""`builtin:gpt`: a causal decoder on bytes, its layers consecutive, its head tied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.contract.builtins import layer_count
from trainer.contract.spec import Program, Training
from trainer.contract.topology import MicroBatch
from trainer.data import Batches
from trainer.program import LoadedProgram, ProgramError, load

pytestmark = pytest.mark.integration

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"To be, or not to be, that is the question:\n" * 40)
    return path


def gpt(text: Path, /, **args: Any) -> LoadedProgram:
    return load(Program(source="builtin:gpt", args=SMALL | {"text": str(text)} | args))


def run(program: LoadedProgram, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    value = program.inputs(batch)
    for layer in program.layers():
        value = layer(value)
    assert isinstance(value, Tensor)
    return value


def test_it_learns_the_text(text: Path) -> None:
    program = gpt(text, lr=1e-2)
    batches = Batches(program.dataset, Training(batch_size=8, steps=30))
    torch.manual_seed(0)
    layers = program.layers()
    named = {p: f"{i}.{n}" for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    optimizer = program.optimizer([(name, p) for p, name in named.items()])
    assert optimizer is not None
    losses = []
    for step in range(1, 31):
        batch = batches.fetch(step, MicroBatch(0, 0, 8)).tensors
        value = program.inputs(batch)
        for layer in layers:
            value = layer(value)
        loss = program.loss(value, batch)
        mean = loss.sum / loss.weight
        losses.append(mean.item())
        optimizer.zero_grad()
        torch.autograd.backward(mean)
        optimizer.step()
    assert abs(losses[0] - torch.log(torch.tensor(256.0))) < 0.2
    assert losses[-1] < 3.0


def test_a_byte_depends_on_none_that_comes_after_it(text: Path) -> None:
    program = gpt(text)
    tokens = torch.stack([program.dataset[i]["tokens"] for i in range(3)])
    other = tokens.clone()
    other[:, 10] ^= 1
    one, two = run(program, {"tokens": tokens}), run(program, {"tokens": other})
    assert torch.equal(one[:, :10], two[:, :10])
    assert not torch.allclose(one[:, 10:], two[:, 10:])


def test_the_weights_depend_on_the_seed_alone(text: Path) -> None:
    batch = {"tokens": gpt(text).dataset[0]["tokens"][None]}
    assert torch.equal(run(gpt(text), batch, seed=1), run(gpt(text), batch, seed=1))
    assert not torch.equal(run(gpt(text), batch, seed=1), run(gpt(text), batch, seed=2))


def test_it_builds_on_meta_with_a_tied_head_and_without_buffers(text: Path) -> None:
    with torch.device("meta"):
        layers = gpt(text).layers()
    assert len(layers) == layer_count("gpt", SMALL) == 4
    assert all(p.is_meta for layer in layers for p in layer.parameters())
    assert [b for layer in layers for b in layer.buffers()] == []
    assert layers[-1].weight is layers[0].tokens
    untied = gpt(text, tied=False).layers()
    assert untied[-1].weight is not untied[0].tokens


def test_each_byte_is_predicted_once(text: Path) -> None:
    dataset = gpt(text).dataset
    windows = [bytes(dataset[i]["tokens"].tolist()) for i in range(len(dataset))]
    predicted = b"".join(window[1:] for window in windows)
    assert text.read_bytes()[1:].startswith(predicted)
    assert len(predicted) > len(text.read_bytes()) * 0.94


def test_an_evaluation_takes_so_many_samples_spread_over_the_end_of_the_text(text: Path) -> None:
    def windows(**args: Any) -> list[list[int]]:
        dataset = gpt(text, **args).eval_dataset
        return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]

    every = windows()
    assert len(every) == 5, "all of so short a text"
    assert bytes(every[0]) == text.read_bytes()[-86:][:17]
    assert windows(held_out=2) == [every[0], every[2]]
    assert windows(held_out=9) == every


def test_another_text_has_another_fingerprint(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes().replace(b"question", b"questiom", 1))
    assert gpt(text).dataset.fingerprint == gpt(text).dataset.fingerprint
    assert gpt(text).dataset.fingerprint != gpt(other).dataset.fingerprint


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"widht": 3}, "unknown argument 'widht'; there are: layers, width"),
        ({"width": 30}, "width 30 is no multiple of heads 4"),
        ({"context": 4000}, "too short for the context 4000"),
        ({"text": "/nowhere"}, "No such file or directory: '/nowhere'"),
    ],
)
def test_arguments_that_do_not_work_are_refused_in_words(
    text: Path, args: dict[str, Any], message: str
) -> None:
    program = gpt(text, **args)
    with pytest.raises(ProgramError) as error:
        program.layers()
        _ = program.dataset
    assert message in str(error.value)


def test_the_learning_rate_warms_up_and_decays(text: Path) -> None:
    program = gpt(text, warmup=10, decay=110)
    scales = [program.lr_scale(step) for step in (1, 5, 10, 60, 110, 500)]
    assert scales == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1, 0.1])
    assert gpt(text, warmup=0).lr_scale(1) == 1.0
