"""A bundle is unpacked with distrust."""

import io
import tarfile
from pathlib import Path

import pytest

from agent.bundles import BundleError, placed, unpack
from tests.fakes.zygotes import run_spec
from trainer.contract.spec import Program


def archive(path: Path, *members: tarfile.TarInfo, content: bytes = b"x = 1\n") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def test_plain_files_and_folders_arrive(tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "b", member("pkg", tarfile.DIRTYPE), member("pkg/a.py"), member("deep/er/b.py"),
        member("run.sh", mode=0o4755),
    )  # fmt: skip
    unpack(packed, tmp_path / "out")
    assert (tmp_path / "out/pkg/a.py").read_bytes() == b"x = 1\n"
    assert (tmp_path / "out/deep/er/b.py").exists()
    assert (tmp_path / "out/run.sh").stat().st_mode & 0o7777 == 0o755 & ~umask()


def umask() -> int:
    return int(next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Umask")
    ), 8)  # fmt: skip


@pytest.mark.parametrize(
    "evil",
    [
        member("../escape.py"),
        member("a/../../escape.py"),
        member("/tmp/escape.py"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("link", tarfile.LNKTYPE, "a.py"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name,
)
def test_what_could_reach_outside_is_refused(tmp_path: Path, evil: tarfile.TarInfo) -> None:
    packed = archive(tmp_path / "b", member("a.py"), evil)
    with pytest.raises(BundleError):
        unpack(packed, tmp_path / "out")
    assert {path.name for path in tmp_path.rglob("*")} <= {"b", "out", "a.py"}


def test_a_file_that_comes_twice_does_not_replace_the_first(tmp_path: Path) -> None:
    packed = archive(tmp_path / "b", member("a.py"), member("a.py"))
    with pytest.raises(FileExistsError):
        unpack(packed, tmp_path / "out")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"not a tar")
    with pytest.raises(BundleError):
        unpack(tmp_path / "b", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "there"),
    [
        ("gpt.py", "/b/gpt.py"),
        ("builtin:gpt", "builtin:gpt"),
        ("hf:small/config.json", "hf:/b/small/config.json"),
    ],
)
def test_a_programs_paths_are_those_of_its_bundle(source: str, there: str) -> None:
    given = run_spec().model_copy(update={"program": Program(source=source, workdir=".")})
    program = placed(given, Path("/b")).program
    assert (program.source, program.workdir) == (there, "/b")


@pytest.mark.parametrize(("folder", "there"), [("base", "/b/base"), ("/mnt/base", "/mnt/base")])
def test_the_weights_to_begin_with_may_lie_in_the_bundle(folder: str, there: str) -> None:
    given = run_spec().model_copy(update={"init_from": folder})
    assert placed(given, Path("/b")).init_from == there
