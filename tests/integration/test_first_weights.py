"""The first weights: the seed's alone, whole, measured, and refused when they cannot be trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import programs
from trainer import first_weights
from trainer.checkpoint import read_header, read_layers
from trainer.contract.listing import complete, scan
from trainer.contract.progress import Finished, Inspected, Line, PartWritten, PhaseBegun
from trainer.contract.spec import Program, RunSpec, Saving, Shape, Training
from trainer.data import Batches
from trainer.program import ProgramError, load
from trainer.stages import Model, Stage

pytestmark = pytest.mark.integration


def spec(root: Path, source: str, seed: int = 0, **args: Any) -> RunSpec:
    return RunSpec(
        kind="first_weights",
        job="job_a",
        generation=1,
        rank=0,
        shape=Shape(depth=1, replicas=1, micro_batch=4),
        cuts=(),
        program=Program(source=source, args=args),
        training=Training(batch_size=10, steps=3, seed=seed),
        saving=Saving(root=str(root)),
    )


def run(root: Path, name: str, seed: int = 0, **args: Any) -> list[Line]:
    lines: list[Line] = []
    first_weights.run(spec(root, str(programs.path(name)), seed, **args), lines.append)
    return lines


def inspected(lines: list[Line]) -> Inspected:
    (line,) = [line for line in lines if isinstance(line, Inspected)]
    return line


def test_it_says_what_it_saw_and_wrote_and_that_it_is_done(tmp_path: Path) -> None:
    lines = [line for line in run(tmp_path, "tied") if not isinstance(line, PhaseBegun)]
    assert [type(line) for line in lines] == [Inspected, PartWritten, Finished]
    listing = scan(tmp_path)
    assert [c.folder for c in complete(listing)] == ["step-000000.g1"]
    assert [(m.generation, m.resumed_from) for m in listing.markers] == [(1, None)]
    header = read_header(tmp_path / "step-000000.g1")
    assert (header.step, header.layer_count, header.data.samples) == (0, 5, 100)


def test_every_parameter_and_buffer_is_written_as_a_plain_script_would_make_it(
    tmp_path: Path,
) -> None:
    run(tmp_path, "tied", seed=5)
    states = read_layers(tmp_path / "step-000000.g1", range(5))
    torch.manual_seed(5)
    for index, layer in enumerate(load(Program(source=str(programs.path("tied")))).layers()):
        found = states[index].parameters | states[index].buffers
        expected = layer.state_dict(prefix=f"layers.{index}.")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert states[index].optimizer == {}
    assert states[4].aliases == {"layers.4.weight": "layers.0.tokens.weight"}


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    def written(folder: str, seed: int) -> dict[str, bytes]:
        run(tmp_path / folder, "mlp", seed)
        files = (tmp_path / folder / "step-000000.g1").glob("layer-*")
        return {file.name: file.read_bytes() for file in files}

    assert written("a", 1) == written("b", 1)
    assert written("c", 2) != written("a2", 1)


def test_the_costs_are_of_the_jobs_micro_batch(tmp_path: Path) -> None:
    costs = inspected(run(tmp_path, "tied", width=16)).costs
    assert (costs.micro_batch, costs.tied) == (4, ((0, 4),))
    assert [layer.name for layer in costs.layers] == ["Embed", "Block", "Block", "Block", "Head"]
    assert all(layer.forward_seconds > 0 for layer in costs.layers)
    assert all(layer.backward_seconds > 0 for layer in costs.layers)
    embed, block, *_, head = costs.layers
    assert embed.parameter_bytes == 17 * 16 * 4
    assert block.parameter_bytes == (16 * 16 + 3 * 16) * 4
    assert head.parameter_bytes == (17 * 16 + 17) * 4
    assert embed.output_bytes == block.output_bytes == 4 * 5 * 16 * 4


def test_each_layers_own_seconds_are_measured_forward_and_backward(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        """
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.03))
        return super().forward(x)

def layers(args): return [nn.Linear(8, 8), Slow(8, 8), nn.Linear(8, 8)]
def dataset(args): return [{'x': torch.ones(8)}] * 20
def inputs(batch): return batch['x']
def loss(output, batch): return output.mean()
"""
    )
    lines: list[Line] = []
    first_weights.run(spec(tmp_path, str(source)), lines.append)
    costs = inspected(lines).costs
    first, slow, last = costs.layers
    assert slow.forward_seconds >= 0.02
    assert slow.backward_seconds >= 0.03
    assert costs.measured_seconds is not None
    others = sum(x.forward_seconds + x.backward_seconds for x in (first, last))
    assert others < costs.measured_seconds - 2 * 0.05


def test_layers_that_hand_on_tuples_are_measured_too(tmp_path: Path) -> None:
    costs = inspected(run(tmp_path, "tuples")).costs
    assert [layer.output_bytes for layer in costs.layers] == [4 * 4 * 4 + 4 * 4] * 3 + [4 * 2 * 4]


def test_the_builtin_gpt_begins(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"It was the best of times, it was the worst of times. " * 20)
    lines: list[Line] = []
    args: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 8, "text": str(text)}
    first_weights.run(spec(tmp_path, "builtin:gpt", **args), lines.append)
    assert inspected(lines).costs.tied == ((0, 3),)
    data = read_header(tmp_path / "step-000000.g1").data
    assert "sha256" in data.fingerprint


def test_what_was_written_loads_into_a_stage(tmp_path: Path) -> None:
    run(tmp_path, "tied", dropout=0.5)
    program = load(Program(source=str(programs.path("tied"))))
    model, training = Model.draw(program), Training(batch_size=10, steps=3)
    for mine in (range(0, 2), range(2, 5)):
        states = read_layers(tmp_path / "step-000000.g1", mine)
        stage = Stage(program, model, mine, training, states, step=0)
        assert list(stage.layers) == list(mine)
    assert (
        Batches(program.dataset, training).position == read_header(tmp_path / "step-000000.g1").data
    )


# --- Refusals


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("layers", "layers() raised ValueError: no layers today"),
        ("dataset", "dataset() raised FileNotFoundError: no data today"),
        ("sample", "raised OSError: no such picture"),
        ("forward", "layer 1 raised RuntimeError: no forward today"),
        ("loss", "loss() raised ZeroDivisionError: no loss today"),
    ],
)
def test_a_program_that_fails_is_refused_before_anything_is_written(
    tmp_path: Path, where: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=r"\(failing\.py:\d+\)$") as error:
        run(tmp_path, "failing", where=where)
    assert message in str(error.value)
    assert scan(tmp_path).newest_generation == 0


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("nn.BatchNorm1d(3)", "changes its buffer"),
        ("Plain()", "keeps the tensor 'table' as a plain attribute"),
        ("nn.Linear(3, 3, device='meta')", "gives its weight no value"),
        ("Infinite()", "layer 1's weight does not begin with finite numbers"),
        ("Listed()", "keeps the tensor 'tables' as a plain attribute"),
        ("nn.LazyLinear(3)", "layer 1's weight has no size yet"),
        ("nn.LSTM(3, 3)", "layer 1 gives a tuple of Tensor, tuple: it must give"),
        ("nn.Linear(4, 3)", "layer 1 raised RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_words(
    tmp_path: Path, layer: str, message: str
) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        f"""
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x):
        return x * self.table

class Listed(Plain):
    def __init__(self):
        nn.Module.__init__(self)
        self.tables = [torch.ones(3)]

class Infinite(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        nn.init.constant_(self.weight, float("inf"))

def layers(args): return [nn.Linear(3, 3), {layer}, nn.Linear(3, 1)]
def dataset(args): return [{{"x": torch.ones(3)}}] * 9
def inputs(batch): return batch["x"]
def loss(output, batch): return output.mean()
"""
    )
    with pytest.raises(ProgramError) as error:
        first_weights.run(spec(tmp_path / "root", str(source)), lambda _: None)
    assert message in str(error.value)


def test_a_module_that_keeps_a_list_of_its_weights_runs_with_those_that_are_loaded(
    tmp_path: Path,
) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nfrom torch import nn\n"
        "class Recurrent(nn.GRU):\n"
        "    def forward(self, x): return super().forward(x)[0]\n"
        "def layers(args): return [Recurrent(3, 3), nn.Linear(3, 1)]\n"
        "def dataset(args): return [{'x': torch.ones(5, 3)}] * 9\n"
        "def inputs(batch): return batch['x']\n"
        "def loss(output, batch): return output.mean()\n"
    )
    lines: list[Line] = []
    first_weights.run(spec(tmp_path / "root", str(source)), lines.append)
    assert any(isinstance(line, Finished) for line in lines)


@pytest.mark.parametrize(
    ("layers", "loss", "message"),
    [
        ("[nn.Tanh(), nn.Tanh()]", "output.mean()", "there is nothing to train: no layer has"),
        ("[nn.Linear(3, 1).requires_grad_(False)]", "output.mean()", "there is nothing to train"),
        ("[nn.Linear(3, 1)]", "output.detach().mean()", "a number that no weight has a part in"),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(
    tmp_path: Path, layers: str, loss: str, message: str
) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nfrom torch import nn\n"
        f"def layers(args): return {layers}\n"
        "def dataset(args): return [{'x': torch.ones(3)}] * 9\n"
        "def inputs(batch): return batch['x']\n"
        f"def loss(output, batch): return {loss}\n"
    )
    with pytest.raises(ProgramError, match=message):
        first_weights.run(spec(tmp_path, str(source)), lambda _: None)
