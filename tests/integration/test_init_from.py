"""`init_from`: a job begins with weights that somebody else has made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.fakes import programs
from tests.integration.test_first_weights import run, spec
from trainer import first_weights
from trainer.checkpoint import read_layers
from trainer.contract.progress import Finished, Line
from trainer.contract.spec import Program
from trainer.program import ProgramError, load

pytestmark = pytest.mark.integration

NAMED = """
def weight_names(args):
    return {"layers.0": "embed", "layers.4": "head"}
"""


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """The program `tied`, that says what its first and last layer are called elsewhere."""
    path = tmp_path / "named.py"
    path.write_text(programs.path("tied").read_text() + NAMED)
    return path


def weights(path: Path) -> dict[str, Tensor]:
    """What the program's model has, by its own names, with values of our own."""
    program = load(Program(source=str(path)))
    torch.manual_seed(99)
    states = first_weights.build(program, seed=1)
    outside = program.outside
    return {
        (outside.renamed(name) if outside else None) or name: torch.randn_like(tensor)
        for state in states.values()
        for name, tensor in state.parameters.items()
    }


def begun_with(root: Path, path: Path, folder: Path) -> dict[str, Tensor]:
    """The first weights of a job, by global name."""
    lines: list[Line] = []
    given = spec(root, str(path)).model_copy(update={"init_from": str(folder)})
    first_weights.run(given, lines.append)
    assert isinstance(lines[-1], Finished)
    states = read_layers(root / "step-000000.g1", range(5))
    return {name: p for state in states.values() for name, p in state.parameters.items()}


def saved(folder: Path, *parts: dict[str, Tensor]) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    return folder


def test_every_weight_is_the_folders_under_the_models_own_names(
    tmp_path: Path, named: Path
) -> None:
    given = weights(named)
    half = len(given) // 2
    items = list(given.items())
    folder = saved(tmp_path / "base", dict(items[:half]), dict(items[half:]))
    found = begun_with(tmp_path / "job", named, folder)
    assert torch.equal(found["layers.0.tokens.weight"], given["embed.tokens.weight"])
    assert torch.equal(found["layers.4.weight"], given["embed.tokens.weight"])
    own = {name: tensor for name, tensor in given.items() if name in found}
    assert own and all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_other_precisions_are_cast(tmp_path: Path, named: Path) -> None:
    given = {name: tensor.bfloat16() for name, tensor in weights(named).items()}
    found = begun_with(tmp_path / "job", named, saved(tmp_path / "base", given))
    assert found["layers.0.tokens.weight"].dtype == torch.float32
    assert torch.equal(found["layers.0.tokens.weight"], given["embed.tokens.weight"].float())


def test_a_tied_weight_may_be_there_under_any_of_its_names_if_it_is_the_same(
    tmp_path: Path, named: Path
) -> None:
    given = weights(named)
    tied = given.pop("embed.tokens.weight")
    found = begun_with(tmp_path / "a", named, saved(tmp_path / "1", {**given, "head.weight": tied}))
    assert torch.equal(found["layers.0.tokens.weight"], tied)
    both = {**given, "head.weight": tied + 1, "embed.tokens.weight": tied}
    with pytest.raises(ProgramError, match=r"embed.tokens.weight and head.weight apart, which are"):
        begun_with(tmp_path / "b", named, saved(tmp_path / "2", both))


def test_a_checkpoint_of_another_job_is_a_beginning_too(tmp_path: Path) -> None:
    run(tmp_path / "other", "tied", seed=7)
    other = tmp_path / "other" / "step-000000.g1"
    found = begun_with(tmp_path / "job", programs.path("tied"), other)
    theirs = read_layers(other, range(5))
    for state in theirs.values():
        assert all(torch.equal(found[name], p) for name, p in state.parameters.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed.tokens.weight": None}, r"it lacks embed.tokens.weight"),
        ({"embed.tokens.weight": torch.ones(3)}, r"it has embed.tokens.weight of \(3,\), not \("),
        ({"extra": torch.ones(1)}, r"it has, and the model has not, extra$"),
        ({"embed.tokens.weight": None, "a": torch.ones(1)}, r"lacks embed.*; it has, and .* a$"),
    ],
    ids=["missing", "another shape", "left over", "missing and left over"],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, named: Path, change: dict[str, Any], message: str
) -> None:
    given = {n: t for n, t in (weights(named) | change).items() if t is not None}
    with pytest.raises(ProgramError, match=message):
        begun_with(tmp_path / "job", named, saved(tmp_path / "base", given))


def test_a_folder_without_weights_is_refused(tmp_path: Path, named: Path) -> None:
    with pytest.raises(ProgramError, match=r"holds no .safetensors file"):
        begun_with(tmp_path / "job", named, tmp_path / "nowhere")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ProgramError, match=r"init_from cannot be read"):
        begun_with(tmp_path / "job", named, tmp_path / "bad")
