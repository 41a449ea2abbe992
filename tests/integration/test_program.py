"""Loading a user's program, and what is said when it fails."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import programs
from trainer.contract.spec import Program
from trainer.program import LoadedProgram, ProgramError, load

pytestmark = pytest.mark.integration


def program(name: str, **args: Any) -> LoadedProgram:
    return load(Program(source=str(programs.path(name)), args=args))


def wrote(folder: Path, text: str, name: str = "own.py") -> LoadedProgram:
    (folder / name).write_text(text)
    return load(Program(source=str(folder / name), workdir=str(folder)))


def with_loss(folder: Path, returns: str) -> LoadedProgram:
    return wrote(
        folder,
        "import torch\ndef layers(args): return [torch.nn.Linear(1, 1)]\n"
        "def dataset(args): return [{'x': 1.0}]\n"
        f"def loss(output, batch): return {returns}\n",
    )


BATCH = {"x": torch.ones(4, 3)}
OUTPUT = torch.tensor([[1.0], [2.0], [3.0], [6.0]])


# --- Losses


@pytest.mark.parametrize(
    ("returns", "total", "weight"),
    [
        ("output.mean()", 12.0, 4.0),
        ("output.mean().reshape(1)", 12.0, 4.0),
        ("(output.sum(), 7)", 12.0, 7.0),
        ("(output.sum(), torch.tensor(7))", 12.0, 7.0),
        ("(output.sum(), 0)", 12.0, 0.0),
    ],
)
def test_every_form_of_loss_is_a_sum_and_a_weight(
    tmp_path: Path, returns: str, total: float, weight: float
) -> None:
    found = with_loss(tmp_path, returns).loss(OUTPUT, BATCH)
    assert (found.sum.item(), found.weight, found.metrics) == (total, weight, {})
    assert found.sum.shape == ()


def test_a_metric_is_a_mean_or_a_sum_with_its_weight(tmp_path: Path) -> None:
    loss = with_loss(tmp_path, "(output.sum(), 8, {'accuracy': 0.5, 'right': (output.sum(), 3)})")
    assert loss.loss(OUTPUT, BATCH).metrics == {"accuracy": (4.0, 8.0), "right": (12.0, 3.0)}


def test_a_loss_that_is_not_finite_is_left_to_the_vote(tmp_path: Path) -> None:
    assert math.isnan(with_loss(tmp_path, "output.mean() * float('nan')").loss(OUTPUT, BATCH).sum)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("output", "loss() gives a tensor of torch.float32 and shape (4, 1), not one floating"),
        ("None", "loss() gives nothing; it must give the mean, (sum, weight)"),
        ("(output.sum(), -1)", "loss() gives the weight -1.0"),
        ("(output.sum(), 'many')", "loss() gives for the weight a str, not a number"),
        ("(output.sum(), output)", "loss() gives for the weight a tensor of torch.float32"),
        ("(output.sum(), 1, {'a': output})", "for the metric 'a' a tensor of torch.float32"),
        ("(output.sum(), 1, 5)", "loss() gives metrics that are an int"),
        ("output.sum().long()", "not one floating number"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_in_words(
    tmp_path: Path, returns: str, message: str
) -> None:
    with pytest.raises(ProgramError) as error:
        with_loss(tmp_path, returns).loss(OUTPUT, BATCH)
    assert message in str(error.value)


# --- Blame


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("layers", "layers() raised ValueError: no layers today"),
        ("dataset", "dataset() raised FileNotFoundError: no data today"),
        ("sample", "dataset[3] raised OSError: no such picture"),
        ("loss", "loss() raised ZeroDivisionError: no loss today"),
        ("forward", "layer 1 raised RuntimeError: no forward today"),
    ],
)
def test_an_error_names_the_users_file_and_line(where: str, message: str) -> None:
    failing = program("failing", where=where)
    with pytest.raises(ProgramError) as error:
        layers = failing.layers()
        x = torch.as_tensor(failing.dataset[3]["x"])
        with failing.blaming("layer 1"):
            x = layers[1](x)
        failing.loss(x, {"x": x})
    said = message.split(": ")[1]
    lines = programs.path("failing").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if said in text]
    assert str(error.value) == f"{message} (failing.py:{line})"
    assert "Traceback" in error.value.details


def test_an_error_deep_in_a_library_is_blamed_on_the_users_line(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"raised JSONDecodeError: .* \(own\.py:2\)$"):
        wrote(tmp_path, "import json\njson.loads('{')\n")


def test_an_environment_below_the_programs_folder_is_not_the_users_code(tmp_path: Path) -> None:
    packages = tmp_path / "venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "bad_package.py").write_text("def fail():\n    raise ValueError('deep')\n")
    with pytest.raises(ProgramError, match=r"raised ValueError: deep \(own\.py:4\)$"):
        wrote(
            tmp_path,
            f"import sys\nsys.path.append({str(packages)!r})\nimport bad_package\n"
            "bad_package.fail()\n",
        )


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"SyntaxError: '\(' was never closed \(own\.py:2\)$"):
        wrote(tmp_path, "x = 1\ndef layers(args:\n")


def test_a_program_that_exits_is_a_program_error(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"importing own\.py raised SystemExit: 3 \(own\.py:1\)"):
        wrote(tmp_path, "raise SystemExit(3)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.py has no function layers()"),
        ("def layers(args): return []\ndataset = 3\n", "own.py has no function dataset()"),
    ],
)
def test_a_missing_function_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        wrote(tmp_path, text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[]", "layers() gives no layer"),
        ("3", "layers() gives an int, not a list of layers"),
        ("[nn.Tanh(), 'x']", "layers()[1] is a str, not an nn.Module"),
        ("[nn.Tanh()] * 2", "layers()[1] is the same object as an earlier layer"),
    ],
)
def test_layers_that_cannot_be_used_are_refused(tmp_path: Path, layers: str, message: str) -> None:
    loaded = wrote(
        tmp_path,
        f"from torch import nn\ndef layers(args): return {layers}\n"
        "def dataset(args): return []\ndef loss(output, batch): ...\n",
    )
    with pytest.raises(ProgramError) as error:
        loaded.layers()
    assert message in str(error.value)
    with pytest.raises(ProgramError, match="the dataset is empty"):
        _ = loaded.dataset


def test_unknown_programs_are_named() -> None:
    with pytest.raises(ProgramError, match="there is no builtin 'gtp'; there are:"):
        load(Program(source="builtin:gtp"))
    with pytest.raises(ProgramError, match="there is no program file /nowhere/x"):
        load(Program(source="/nowhere/x.py"))


# --- Imports


@pytest.mark.parametrize("name", ["trainer.py", "agent", "controller"])
def test_a_folder_with_one_of_our_names_is_refused(tmp_path: Path, name: str) -> None:
    entry = tmp_path / name
    entry.write_text("") if name.endswith(".py") else entry.mkdir()
    with pytest.raises(ProgramError, match="a name of ours: rename it"):
        wrote(tmp_path, "")


def test_the_programs_folder_comes_last_so_it_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("raise AssertionError('shadowed')")
    (tmp_path / "own_helper.py").write_text("WIDTH = 5\n")
    wrote(
        tmp_path,
        "import json, own_helper, torch\nlayers = dataset = loss = lambda *_: own_helper.WIDTH\n",
    )
    assert sys.path[-1] == str(tmp_path)


def test_a_dataclass_in_a_program_works(tmp_path: Path) -> None:
    wrote(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    width: int = 3\n"
        "def layers(args): ...\ndef dataset(args): ...\ndef loss(output, batch): ...\n",
    )


def test_args_are_read_as_keys_or_attributes() -> None:
    assert len(program("tied", blocks=1).layers()) == 3
    loaded = program("mlp", width=3)
    assert isinstance(first := loaded.layers()[0], nn.Linear) and first.in_features == 3


@pytest.mark.parametrize("asked", ["args['depth']", "args.depth"])
def test_an_argument_that_is_missing_is_named_beside_those_that_are_there(
    tmp_path: Path, asked: str
) -> None:
    (tmp_path / "own.py").write_text(
        f"def layers(args): return {asked}\ndef dataset(args): ...\ndef loss(output, batch): ...\n"
    )
    own = load(Program(source=str(tmp_path / "own.py"), args={"width": 3, "rate": 0.1}))
    with pytest.raises(
        ProgramError, match=r"Error: args has no 'depth'; it has: width, rate \(own"
    ):
        own.layers()


def test_a_random_dataset_is_the_same_on_every_node() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two = program("mlp").dataset, program("mlp").dataset
    torch.testing.assert_close(one[5], two[5], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


# --- Optimizer and schedule


def test_the_default_optimizer_decays_no_biases_and_norms() -> None:
    tied = program("tied", lr=0.5, weight_decay=0.25)
    *layers, _ = tied.layers()  # the last shares the embedding
    named = [pair for layer in layers for pair in layer.named_parameters()]
    optimizer = tied.optimizer(named)
    assert isinstance(optimizer, torch.optim.AdamW)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {p.ndim for p, decay in decays.items() if decay == 0.25} == {2}
    assert {p.ndim for p, decay in decays.items() if decay == 0.0} == {1}
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_a_stage_without_parameters_has_no_optimizer() -> None:
    assert program("mlp").optimizer([]) is None
    assert program("tuples").optimizer([]) is None


def test_the_users_optimizer_schedule_and_inputs_are_taken() -> None:
    named = list(program("tuples").layers()[0].named_parameters())
    assert isinstance(program("tuples").optimizer(named), torch.optim.SGD)
    assert [program("tied").lr_scale(step) for step in (1, 4, 9)] == [0.25, 1.0, 1.0]
    assert program("mlp").lr_scale(3) == 1.0
    batch = {"x": torch.ones(1), "y": torch.ones(1)}
    assert program("mlp").inputs(batch) is batch["x"]
    assert program("tied").inputs(batch) is batch


def test_an_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    own = wrote(
        tmp_path,
        "def layers(args): ...\ndef dataset(args): ...\ndef loss(output, batch): ...\n"
        "def optimizer(named_params, args): ...\ndef lr_scale(step, args): return -1\n",
    )
    with pytest.raises(ProgramError, match=r"own\.py: optimizer\(\) gives nothing"):
        own.optimizer([("w", nn.Parameter(torch.ones(1)))])
    with pytest.raises(ProgramError, match=r"own\.py: lr_scale\(2\) gives -1\.0"):
        own.lr_scale(2)
