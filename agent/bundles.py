"""Programs' folders, fetched once by their hash and unpacked with distrust; a few that nothing here
needs any more are kept, in case their job comes back.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import structlog

from agent.client import Client
from trainer.contract.builtins import source_in
from trainer.contract.spec import Program, RunSpec

_MOST_BYTES = 1 << 30
"""Unpacked."""
_MOST_FILES = 50_000

KEPT, KEPT_SECONDS, KEPT_BYTES = 4, 7 * 86400.0, 2 << 30
"""Of those that nothing needs: so many at most, that were used no longer ago, no more together. The
one used last may be bigger.
"""
_FETCHING, _GONE = ".fetching-", ".gone-"

log = structlog.get_logger()


class BundleError(Exception):
    """A bundle that cannot be used; a sentence."""


class Bundles:
    """The unpacked bundles below one folder; what is there is whole."""

    def __init__(self, folder: Path, client: Client) -> None:
        self._folder = folder
        self._client = client
        self._one_at_a_time = asyncio.Lock()

    async def folder_of(self, digest: str) -> Path:
        """The bundle's folder, fetched if need be. Raises BundleError, ControllerError, OSError."""
        kind, _, wanted = digest.partition(":")
        if kind != "sha256" or len(wanted) != 64 or not set(wanted) <= set("0123456789abcdef"):
            raise BundleError(f"{digest!r} is not sha256:<64 hex digits>")
        async with self._one_at_a_time:
            unpacked = self._folder / wanted
            if not unpacked.is_dir():
                await self._fetch(digest, wanted, unpacked)
            os.utime(unpacked)  # used now
        return unpacked

    async def keep_few(self, needed: Callable[[], Collection[str]]) -> None:
        """Delete what ``needed`` (digests, asked when it is known what there is) does not name and
        is too much, too old or too big, with what says that it was set up; and what an earlier
        agent has left half done.
        """
        async with self._one_at_a_time:
            there = await asyncio.to_thread(_there, self._folder)
            names = {digest.removeprefix("sha256:") for digest in needed()}
            unneeded = [one for one in there if one.name not in names]
            try:
                for one in _too_much(unneeded, time.time()):
                    self._put_away(one.name)
            except OSError as error:
                log.warning("a bundle cannot be deleted", because=str(error))
            left = [path for mark in (_GONE, _FETCHING) for path in self._folder.glob(f"{mark}*")]
            for path in left:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _put_away(self, name: str) -> None:
        """At once: nobody finds half of it. What was set up there goes first."""
        gone = Path(tempfile.mkdtemp(prefix=_GONE, dir=self._folder))
        for path in (*self._folder.glob(f"{name}.setup-*"), self._folder / name):
            path.rename(gone / path.name)

    async def _fetch(self, digest: str, wanted: str, unpacked: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=_FETCHING, dir=self._folder))
        try:
            archive = beside / "bundle.tar.gz"
            await self._client.patiently(lambda: self._download(digest, wanted, archive))
            await asyncio.to_thread(unpack, archive, beside / "unpacked")
            (beside / "unpacked").rename(unpacked)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    async def _download(self, digest: str, wanted: str, archive: Path) -> None:
        hash_ = hashlib.sha256()
        with archive.open("wb") as file:

            def take(piece: bytes) -> None:
                hash_.update(piece)
                file.write(piece)

            await self._client.bundle(digest, take)
        if hash_.hexdigest() != wanted:
            raise BundleError(f"the bundle that came is not {digest}: its hash is another")


@dataclass(frozen=True)
class _Unpacked:
    name: str
    used_at: float
    num_bytes: int


def _there(folder: Path) -> list[_Unpacked]:
    """What is unpacked, the one used last first."""
    found = [
        _Unpacked(path.name, path.stat().st_mtime, sum(_sizes(path)))
        for path in folder.glob("[0-9a-f]*")
        if path.is_dir()
    ]
    return sorted(found, key=lambda one: -one.used_at)


def _sizes(folder: Path) -> Iterator[int]:
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a setup may be at work
                yield os.lstat(os.path.join(path, name)).st_size


def _too_much(unneeded: Collection[_Unpacked], now: float) -> Iterator[_Unpacked]:
    """Of those, the one used last first, which to delete."""
    total = 0
    for number, one in enumerate(unneeded):
        total += one.num_bytes
        too_big = number > 0 and total > KEPT_BYTES
        if number >= KEPT or too_big or one.used_at < now - KEPT_SECONDS:
            yield one


def placed(spec: RunSpec, folder: Path) -> RunSpec:
    """``spec``, whose paths are relative to its bundle, where ``folder`` is the bundle."""
    begun = {"init_from": str(folder / spec.init_from)} if spec.init_from else {}
    return spec.model_copy(update={"program": placed_program(spec.program, folder), **begun})


def placed_program(program: Program, folder: Path) -> Program:
    """The same of its program alone."""
    workdir = str(folder / (program.workdir or "."))
    source = source_in(str(folder), program.source)
    return program.model_copy(update={"source": source, "workdir": workdir})


def unpack(archive: Path, folder: Path) -> None:
    """Unpack plain files and folders. Raises BundleError for anything else, OSError.

    No link, no device, no path that leaves ``folder``, no owner, no mode but the executable bit.
    """
    left_bytes, left_files = _MOST_BYTES, _MOST_FILES
    folder.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                left_bytes, left_files = left_bytes - member.size, left_files - 1
                if left_bytes < 0 or left_files < 0:
                    raise BundleError("the bundle is too big unpacked")
                path = folder / _safe(member)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write(tar.extractfile(member), path, bool(member.mode & 0o100))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise BundleError(f"the bundle cannot be unpacked: {error}") from error


def _safe(member: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise BundleError(f"the bundle holds the path {member.name!r}, which leads outside it")
    if not (member.isreg() or member.isdir()):
        raise BundleError(f"the bundle holds {member.name!r}, which is no plain file or folder")
    return path


def _write(source: IO[bytes] | None, path: Path, is_executable: bool) -> None:
    assert source, "a plain file has content"
    mode = 0o755 if is_executable else 0o644
    with source, open(path, "xb", opener=lambda p, flags: os.open(p, flags, mode)) as file:
        shutil.copyfileobj(source, file)
