"""Programs' folders, fetched once by their hash and unpacked with distrust."""

import asyncio
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import IO

from agent.client import Client
from trainer.contract.builtins import source_in
from trainer.contract.spec import RunSpec

_MOST_BYTES = 1 << 30
"""Unpacked."""
_MOST_FILES = 50_000


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
        return unpacked

    async def _fetch(self, digest: str, wanted: str, unpacked: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".fetching-", dir=self._folder))
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


def placed(spec: RunSpec, folder: Path) -> RunSpec:
    """``spec``, whose paths are relative to its bundle, where ``folder`` is the bundle."""
    program = spec.program
    workdir = str(folder / (program.workdir or "."))
    source = source_in(str(folder), program.source)
    there = {"program": program.model_copy(update={"source": source, "workdir": workdir})}
    begun = {"init_from": str(folder / spec.init_from)} if spec.init_from else {}
    return spec.model_copy(update=there | begun)


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
