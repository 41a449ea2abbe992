"""A folder is packed by its content alone, and what cannot be packed is said with the mend."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from controller.client import pack as packing
from controller.client.pack import Bundle, pack
from controller.client.rest import CliError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "gpt.py", "def layers(args): ...")
    return tmp_path


def write(folder: Path, name: str, text: str = "x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(bundle: Bundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle.content)) as tar:
        return tar.getnames()


def test_the_digest_depends_on_content_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    os.utime(write(other, "gpt.py", "def layers(args): ..."), (1, 1))
    assert pack(folder, "gpt.py") == pack(other, "gpt.py")
    write(other, "gpt.py", "changed")
    assert pack(folder, "gpt.py").digest != pack(other, "gpt.py").digest


def test_ignored_files_stay_behind(folder: Path) -> None:
    write(folder, ".gitignore", "*.log\n/data/\n!keep.log\n")
    write(folder, ".varunaignore", "big.bin\n")
    write(folder, "notes/.gitignore", "*\n!.gitignore\n!kept.txt\n")
    for name in [
        "a.log",
        "data/x",
        "big.bin",
        "notes/a",
        ".git/config",
        "__pycache__/gpt.pyc",
        ".venv/x",
    ]:
        write(folder, name)
    kept = ["gpt.py", "keep.log", "notes/kept.txt", "sub/data/x"]
    for name in kept[1:]:
        write(folder, name)
    assert sorted(names(pack(folder, "gpt.py"))) == sorted(
        [*kept, ".gitignore", "notes/.gitignore"]
    )


def test_a_link_inside_is_packed_as_its_file_and_a_link_outside_is_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "same.py").symlink_to("gpt.py")
    with tarfile.open(fileobj=io.BytesIO(pack(folder, "gpt.py").content)) as tar:
        assert all(member.isreg() for member in tar)
        assert tar.getnames() == ["gpt.py", "same.py"]
    secret = write(tmp_path_factory.mktemp("home"), "id_rsa")
    (folder / "key").symlink_to(secret)
    with pytest.raises(CliError, match="key is a link to a file outside"):
        pack(folder, "gpt.py")


def test_what_is_too_big_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "weights/model.bin", "x" * 2000)
    monkeypatch.setattr(packing, "CAP_BYTES", 1000)
    with pytest.raises(CliError, match=r"Biggest: weights/model.bin \(2.0 kB\).*\.varunaignore"):
        pack(folder, "gpt.py")


@pytest.mark.parametrize("name", ["trainer/__init__.py", "agent.py", "controller/x.txt"])
def test_our_own_import_names_are_refused_at_the_top(folder: Path, name: str) -> None:
    write(folder, name)
    with pytest.raises(CliError, match="an import name of Varuna's own"):
        pack(folder, "gpt.py")


def test_our_own_import_names_are_free_further_down(folder: Path) -> None:
    write(folder, "mine/trainer.py")
    assert "mine/trainer.py" in names(pack(folder, "gpt.py"))


@pytest.mark.parametrize("name", ["my.token", "var/admin.token", "var/varuna.db", "vm/bundles/x"])
def test_tokens_and_the_folders_of_controllers_and_agents_stay_behind(
    folder: Path, name: str
) -> None:
    write(folder, "var/controller.lock")
    write(folder, "vm/agent.lock")
    write(folder, name)
    assert name not in names(pack(folder, "gpt.py"))


def test_a_missing_or_ignored_program_is_said(folder: Path) -> None:
    with pytest.raises(CliError, match=r"The program no.py is not in"):
        pack(folder, "no.py")
    write(folder, ".gitignore", "gpt.py")
    with pytest.raises(CliError, match=r"The program gpt.py is left out by an ignore file"):
        pack(folder, "gpt.py")


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="is not a folder"):
        pack(tmp_path / "no", "gpt.py")
