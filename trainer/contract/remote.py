"""A job's checkpoint folder in an object store, behind any URL that fsspec knows.

The names and the small files are those of a local folder (:mod:`trainer.contract.checkpoints`); the
store has no rename and no fsync: an object is there whole or not, and a part goes last. Everything
here blocks, and a store may stall for ever: that is the caller's to bound. Credentials are fsspec's
affair (``FSSPEC_ABFS='{"account_name": …}'`` and the like).
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from trainer.contract.checkpoints import (
    DONE_FILE,
    Done,
    FolderName,
    Marker,
    Part,
    Sealed,
    is_part,
    marker_file,
    sealed,
)
from trainer.contract.listing import Listing, Skipped, newer_among, read_folder, scan
from trainer.contract.spec import ResumedFrom


class StoreError(Exception):
    """The store did not do what was asked; a sentence."""


def is_url(root: str) -> bool:
    """Whether ``root`` is no path of this machine."""
    return "://" in root


@lru_cache(maxsize=64)
def remote_at(url: str) -> "Remote":
    """The folder at ``url``, one for the process: its connections are worth keeping."""
    return Remote(url)


class Remote:
    """The folder at ``url``. All methods block and raise StoreError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    # ---- reading

    def listing(self, *, check_sizes: bool = True) -> Listing:
        """As :func:`trainer.contract.listing.scan` of a local folder."""
        with self._trouble("listed"):
            sizes = {name: size for name, size in self._sizes().items() if _is_checkpoints(name)}
            with tempfile.TemporaryDirectory(prefix="varuna-look-") as place:
                self._mirror(Path(place), sizes)
                found = scan(place, check_sizes=False)
        parts: list[Part] = []
        skipped = list(found.skipped)
        for part in found.parts:
            wrong = _first_wrong(part, sizes) if check_sizes else None
            if wrong:
                skipped.append(wrong)
            else:
                parts.append(part)
        return replace(found, root=self.url, parts=tuple(parts), skipped=tuple(skipped))

    def parts(self, folder: str) -> tuple[Part, ...]:
        """The usable parts of one checkpoint, by rank; their files are not looked at."""
        with self._trouble("read"), tempfile.TemporaryDirectory(prefix="varuna-parts-") as place:
            names = {f"{folder}/{name}": size for name, size in self._sizes(folder).items()}
            self._mirror(Path(place), names)
            return read_folder(Path(place) / folder, check_sizes=False)[0]

    def fetch(self, name: str, path: Path) -> None:
        """Bring the file ``name`` to ``path``."""
        with self._trouble("fetched"):
            self._fs.get_file(self._at(name), str(path))

    def has(self, name: str) -> bool:
        """Whether the file ``name`` is there."""
        with self._trouble("read"):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._at(name)))

    def folders(self) -> tuple[str, ...]:
        """The names of the folders in it."""
        with self._trouble("listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._base, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return ()
            paths = [one["name"].rstrip("/") for one in found if one["type"] == "directory"]
            return tuple(sorted(path.rsplit("/", 1)[-1] for path in paths if path != self._base))

    def newer_marker(self, generation: int) -> int | None:
        """The highest generation above ``generation`` that has a marker."""
        with self._trouble("listed"):
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(self._base, detail=False)
            except FileNotFoundError:
                return None
            return newer_among((path.rsplit("/", 1)[-1] for path in paths), generation)

    # ---- writing

    def put(self, path: Path, name: str) -> None:
        """Bring the file at ``path`` there as ``name``; durable on return."""
        with self._trouble("written"):
            self._fs.put_file(str(path), self._at(name))
            size = self._fs.info(self._at(name))["size"]
        if size != path.stat().st_size:
            raise StoreError(f"{self.url}/{name} has {size} bytes after writing {path}")

    def write(self, name: str, content: Sealed) -> None:
        """Seal a small file and write it."""
        with self._trouble("written"):
            self._fs.pipe_file(self._at(name), sealed(content))

    def write_marker(self, generation: int, resumed_from: ResumedFrom | None) -> None:
        """As a trainer's rank 0 does in a local folder."""
        content = Marker(generation=generation, resumed_from=resumed_from)
        self.write(marker_file(generation), content)

    def write_done(self, step: int, folder: str) -> None:
        """Say that the job is over."""
        self.write(DONE_FILE, Done(step=step, folder=folder))

    def delete(self, folders: Iterable[str]) -> None:
        """Delete checkpoints, each one's parts first: it is not complete from then on."""
        with self._trouble("deleted"):
            for folder in folders:
                names = sorted(self._sizes(folder), key=lambda name: not name.startswith("part-"))
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(self._at(f"{folder}/{name}"))
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(self._at(folder), recursive=True)  # what a store keeps of a folder

    def tidy(self, generation: int) -> None:
        """Delete what generations before ``generation`` have put into folders without any part."""
        with self._trouble("deleted"):
            files: dict[str, list[str]] = {}
            for path in self._sizes():
                folder, _, name = path.rpartition("/")
                files.setdefault(folder, []).append(name)
        halves = [
            folder
            for folder, names in files.items()
            if (parsed := FolderName.parse(folder)) and parsed.generation < generation
            if not any(map(is_part, names))
        ]
        self.delete(halves)

    # ---- the store itself

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _base(self) -> str:
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """fsspec's file system, for all threads, and the folder's path in it."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        options = {"auto_mkdir": True} if self.url.startswith("file:") else {}
        fs, base = url_to_fs(self.url, **options)
        return fs, base.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _sizes(self, folder: str = "") -> dict[str, int]:
        """What lies below ``folder``: name relative to it -> size."""
        base = f"{self._base}/{folder}".rstrip("/")
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(base, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{base}/"): int(info["size"]) for path, info in found.items()}

    def _mirror(self, place: Path, names: Iterable[str]) -> None:
        """Bring the small files among ``names`` below ``place``, and make the folders they name."""
        small = []
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".json"):
                small.append(name)
        if not small:
            return
        found = self._fs.cat([self._at(name) for name in small], on_error="return")
        for name in small:
            content = found[self._at(name)]
            if isinstance(content, FileNotFoundError):  # deleted meanwhile
                continue
            if isinstance(content, Exception):
                raise content
            (place / name).write_bytes(content)

    @contextlib.contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise StoreError(
                f"{self.url} needs a package that is not installed: {error}"
            ) from error
        except Exception as error:  # every store's library has failures of its own kind
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise StoreError(f"{self.url} cannot be {what}: {said}") from error


def _is_checkpoints(name: str) -> bool:
    """Whether a name from the store is one that a local folder could have."""
    folder, _, file = name.rpartition("/")
    return not folder or ("/" not in folder and FolderName.parse(folder) is not None and file != "")


def _first_wrong(part: Part, sizes: Mapping[str, int]) -> Skipped | None:
    for file in part.files:
        name = f"{part.folder}/{file.name}"
        if name not in sizes:
            return Skipped(name, "is missing", damaged=False)
        if sizes[name] != file.num_bytes:
            return Skipped(name, f"has {sizes[name]} bytes instead of {file.num_bytes}")
    return None
