"""What is exported is loaded by plain torch and plain safetensors, without anything of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.integration.test_checkpoint import FOLDER, LAYERS, room_for, save, trained_states
from tests.unit.trainer.test_checkpoints import after, part, written
from trainer import export, tools
from trainer.contract.remote import remote_at

pytestmark = pytest.mark.integration

TIED = {"layers.6.weight": "layers.0.weight"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder with one checkpoint, written by six ranks."""
    root = tmp_path / "job_a"
    save(root, trained_states(), depth=3, replicas=2)
    return root


def expected() -> dict[str, Tensor]:
    return {
        name: tensor
        for state in trained_states().values()
        for name, tensor in (state.parameters | state.buffers).items()
    }


def assert_model(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def exported(job: Path, to: str, *more: str) -> int:
    return export.main([str(job), "--to", to, "--out", str(job.parent / "out"), *more])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# --- torch ------------------------------------------------------------------------------------


def test_a_state_dict_is_loaded_by_torch_alone(job: Path) -> None:
    assert exported(job, "torch") == 0
    found = torch.load(job.parent / "out", weights_only=True)
    assert_model(found, expected())
    tied, owner = found["layers.6.weight"], found["layers.0.weight"]
    assert tied.data_ptr() == owner.data_ptr(), "stored twice"


class Model(nn.Module):
    """The seven layers as a program of one's own would hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        for index, layer in enumerate(self.layers):
            layer.register_buffer("table", torch.zeros(index, dtype=torch.int64))


def test_the_global_names_are_those_of_a_model_that_has_a_list_of_layers(job: Path) -> None:
    exported(job, "torch")
    model = Model()
    model.load_state_dict(torch.load(job.parent / "out", weights_only=True))
    assert_model(dict(model.state_dict()), expected())


# --- hf ---------------------------------------------------------------------------------------


def loaded(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As Hugging Face reads a folder: the index says which file holds what."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files | {"model.safetensors.index.json"} == set(os.listdir(folder))
    found: dict[str, Tensor] = {}
    for file in files:
        shard = safetensors.torch.load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in shard)
        found |= shard
        with safetensors.safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == index["weight_map"].keys()
    return index["metadata"], found


@pytest.mark.parametrize(("shard_bytes", "files"), [(2**30, 1), (400, 4), (1, 7)])
def test_shards_hold_each_tensor_once_and_a_tied_weight_under_its_owners_name(
    job: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, files: int
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    assert exported(job, "hf") == 0
    about, found = loaded(job.parent / "out")
    wanted = {name: tensor for name, tensor in expected().items() if name not in TIED}
    assert_model(found, wanted)
    assert about == {
        "total_size": sum(t.nbytes for t in wanted.values()), "step": 12, "tied": TIED,
    }  # fmt: skip
    assert len(os.listdir(job.parent / "out")) == files + 1


def test_names_are_the_programs_own_when_it_gives_them(job: Path) -> None:
    names = job.parent / "names.json"
    names.write_text(json.dumps({
        "layers.0": "model.embed", "layers.1": "model.blocks.0", "layers.6": "lm_head",
        "layers.2": "", "layers.3.weight": "model.blocks.2.w",
    }))  # fmt: skip
    assert exported(job, "hf", "--names", str(names)) == 0
    about, found = loaded(job.parent / "out")
    assert about["tied"] == {"lm_head.weight": "model.embed.weight"}
    own = {"model.embed.weight", "model.blocks.0.bias", "weight", "model.blocks.2.w",
           "layers.3.bias", "layers.4.weight", "lm_head.bias"}  # fmt: skip
    assert own <= found.keys() and "lm_head.weight" not in found
    assert torch.equal(found["model.blocks.0.bias"], expected()["layers.1.bias"])


def test_two_tensors_of_one_name_are_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = job.parent / "names.json"
    names.write_text('{"layers.1": "same", "layers.2": "same"}')
    for to in ("hf", "torch"):
        assert exported(job, to, "--names", str(names)) == 1
        assert "layers.1.bias and layers.2.bias would both be named" in said(capsys)
    names.write_text('["layers.1"]')
    assert exported(job, "hf", "--names", str(names)) == 1
    assert "must be a JSON object" in said(capsys)
    assert_nothing_is_left(job)


# --- Which, and what goes wrong -----------------------------------------------------------------


def assert_nothing_is_left(job: Path) -> None:
    assert set(os.listdir(job.parent)) <= {"job_a", "job_b", "names.json"}


@pytest.mark.parametrize("where", ["job_a", f"job_a/{FOLDER}", "."])
def test_a_checkpoint_a_job_or_the_folder_of_one_job_can_be_named(
    job: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(job.parent / where), "--to", "torch", "--json",
                        "--out", str(job.parent / "out")]) == 0  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert (told["source"], told["step"], told["tensors"]) == (str(job / FOLDER), 12, 21)


def test_any_step_of_a_job_can_be_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(job, part(20, 3, resumed_from=after(12, 3)))
    assert exported(job, "torch", "--step", "12", "--json") == 0
    assert json.loads(capsys.readouterr().out)["source"] == str(job / FOLDER)
    assert exported(job, "hf", "--step", "13") == 1
    assert "no complete checkpoint of step 13, but of 12, 20" in said(capsys)


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_what_is_in_a_store_is_exported_from_there(
    emulated: str, job: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{emulated}/{tmp_path.name}/job_a"
    for file in (job / FOLDER).iterdir():
        remote_at(url).put(file, f"{FOLDER}/{file.name}")
    aside = job.rename(tmp_path / "elsewhere")
    out = ["--to", to, "--out", str(tmp_path / "out"), "--json"]
    assert export.main([url, *out]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == f"{url}/{FOLDER}"
    if to == "torch":
        assert_model(torch.load(tmp_path / "out", weights_only=True), expected())
    else:
        assert loaded(tmp_path / "out")[1].keys() == expected().keys() - TIED.keys()
    (file,) = (aside / FOLDER).glob("layer-005.*")
    remote_at(url).put(damaged(file), f"{FOLDER}/{file.name}")
    (tmp_path / "out").rename(tmp_path / "before")
    assert export.main([url, *out]) == 1
    assert f"{url}/{FOLDER}/{file.name} has another content" in said(capsys)
    assert not (tmp_path / "out").exists()


def test_what_is_in_a_store_is_listed_and_verified_there(
    emulated: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{emulated}/{tmp_path.name}/job_a"
    for file in (job / FOLDER).iterdir():
        remote_at(url).put(file, f"{FOLDER}/{file.name}")
    for where in (url, url.removesuffix("/job_a"), f"{url}/{FOLDER}"):
        assert tools.main(["checkpoint", "list", where]) == 0
        told = capsys.readouterr().out
        assert told.startswith(f"{url}\n") and "complete, newest to resume" in told
        assert tools.main(["checkpoint", "verify", where]) == 0
        assert "of 1 checkpoints: none damaged" in capsys.readouterr().out
    (file,) = (job / FOLDER).glob("layer-005.*")
    remote_at(url).put(damaged(file), f"{FOLDER}/{file.name}")
    assert tools.main(["checkpoint", "verify", url]) == 1
    assert f"{url}/{FOLDER}/{file.name} has another content" in capsys.readouterr().out


def damaged(file: Path) -> Path:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_a_flipped_byte_is_found_before_anything_is_there(
    job: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (job / FOLDER).glob("layer-005.*")
    damaged(file)
    assert exported(job, to) == 1
    assert f"{file} has another content than was written" in said(capsys)
    assert_nothing_is_left(job)


def test_what_cannot_be_exported_is_said_in_a_sentence(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(job.parent / "job_b", trained_states())
    assert exported(job.parent, "torch") == 1
    assert "holds 2 jobs: name one of them" in said(capsys)
    assert exported(job / "no", "torch") == 3
    assert "there is no complete checkpoint in" in said(capsys)
    (part,) = (job / FOLDER).glob("part-3.json")
    part.unlink()
    assert exported(job, "torch") == 3
    said(capsys)
    assert exported(job / FOLDER, "torch") == 1
    assert "is incomplete, 1 of 7 layers are missing" in said(capsys)
    assert_nothing_is_left(job)
    assert exported(job.parent / "job_b", "torch") == exported(job.parent / "job_b", "hf") - 1
    assert "out is there already" in said(capsys)


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_a_disk_that_is_full_leaves_nothing(
    job: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with room_for(300):
        assert exported(job, to) == 1
    assert said(capsys).startswith("Nothing was exported: ")
    assert_nothing_is_left(job)


def test_the_command_line_exports(job: Path) -> None:
    ran = subprocess.run(
        [Path(sys.executable).with_name("varuna"), "checkpoint", "export", str(job),
         "--to", "hf", "--out", str(job.parent / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (
        f"20 tensors, {loaded(job.parent / 'out')[0]['total_size']:,} bytes, step 12" in ran.stdout
    )
