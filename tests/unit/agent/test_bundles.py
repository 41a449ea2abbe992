"""A bundle is unpacked with distrust, and goes when it is of no more use."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from agent import bundles
from agent.bundles import BundleError, Bundles, placed, unpack
from agent.client import Client
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


class Kept:
    """A folder of unpacked bundles: the n-th was used n days ago and holds a byte."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self._now = time.time()
        self.names = [f"{n:064x}" for n in range(number)]
        for days, name in enumerate(self.names):
            self.fill(name, 1)
            self.used(name, days)

    def fill(self, name: str, num_bytes: int) -> None:
        (self.folder / name / "deep").mkdir(parents=True, exist_ok=True)
        (self.folder / name / "deep" / "train.py").write_bytes(b"#" * num_bytes)

    def used(self, name: str, days: float) -> None:
        at = self._now - 86400 * days
        os.utime(self.folder / name, (at, at))

    def left(self, needed: Collection[str] = ()) -> list[str]:
        """What is still there when few were kept."""

        async def keep_few() -> None:
            client = Client("http://127.0.0.1:1", "", "node-1")
            await Bundles(self.folder, client).keep_few(lambda: [f"sha256:{n}" for n in needed])
            await client.close()

        asyncio.run(keep_few())
        return sorted(path.name for path in self.folder.iterdir())


def test_the_few_bundles_that_were_used_last_stay(tmp_path: Path) -> None:
    kept = Kept(tmp_path, bundles.KEPT + 2)
    assert kept.left() == kept.names[: bundles.KEPT]


def test_no_bundle_goes_that_something_needs(tmp_path: Path) -> None:
    kept = Kept(tmp_path, bundles.KEPT + 2)
    kept.used(kept.names[-1], 100)
    assert kept.left(needed=kept.names[-1:]) == [*kept.names[: bundles.KEPT], kept.names[-1]]


def test_a_bundle_that_nobody_used_for_long_goes(tmp_path: Path) -> None:
    kept = Kept(tmp_path, 2)
    kept.used(kept.names[1], bundles.KEPT_SECONDS / 86400 + 1)
    assert kept.left() == kept.names[:1]


def test_big_bundles_go_but_for_the_one_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "KEPT_BYTES", 100)
    kept = Kept(tmp_path, 3)
    kept.fill(kept.names[0], 200)
    kept.used(kept.names[0], 0)
    assert kept.left() == kept.names[:1]


def test_what_was_set_up_goes_with_its_bundle_and_so_does_what_was_left_half_done(
    tmp_path: Path,
) -> None:
    kept = Kept(tmp_path, bundles.KEPT + 1)
    stays, goes = (tmp_path / f"{kept.names[n]}.setup-0123" for n in (0, -1))
    stays.touch()
    goes.touch()
    (tmp_path / ".fetching-abc" / "unpacked").mkdir(parents=True)
    assert kept.left() == sorted([*kept.names[: bundles.KEPT], stays.name])
