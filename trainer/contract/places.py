"""A checkpoint folder wherever it is, for a person who looks into it: on this machine, or in a
store behind a URL. Everything blocks; what cannot be reached raises OSError or StoreError.
"""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from trainer.contract.checkpoints import FolderName, LayerFile, part_file, write_json
from trainer.contract.listing import Checkpoint, Listing, Unusable, check_content, scan
from trainer.contract.remote import Remote, StoreError, is_url, remote_at


class Place(Protocol):
    """One job's folder, or a folder of such folders."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    def listing(self, *, check_sizes: bool = True) -> Listing:
        """What is in it as a job's folder."""

    def below(self) -> "tuple[Place, ...]":
        """The folders in it; none when it is not there."""

    def check(self, folder: str, file: LayerFile) -> None:
        """Read a whole file. Raises Unusable unless size and hash are right."""

    def brought(self, checkpoint: Checkpoint) -> AbstractContextManager[Path]:
        """The checkpoint as a folder of this machine, for as long as it is needed."""


def place_at(where: str) -> tuple[Place, str | None]:
    """The folder that ``where`` names; and when it names a checkpoint, the job's and that name."""
    if is_url(where):
        parent, _, last = where.rstrip("/").rpartition("/")
        if FolderName.parse(last):
            return There(remote_at(parent)), last
        return There(remote_at(where)), None
    path = Path(where)
    if FolderName.parse(path.resolve().name):
        return Here(path.resolve().parent), path.resolve().name
    return Here(path), None


class Here:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """Its path."""
        return str(self._path)

    def listing(self, *, check_sizes: bool = True) -> Listing:
        """See :class:`Place`."""
        return scan(self._path, check_sizes=check_sizes)

    def below(self) -> tuple[Place, ...]:
        """See :class:`Place`."""
        try:
            return tuple(Here(path) for path in sorted(self._path.iterdir()) if path.is_dir())
        except FileNotFoundError:
            return ()

    def check(self, folder: str, file: LayerFile) -> None:
        """See :class:`Place`."""
        check_content(self._path / folder, file)

    def brought(self, checkpoint: Checkpoint) -> AbstractContextManager[Path]:
        """It is here already."""
        return nullcontext(self._path / checkpoint.folder)


class There:
    """A folder in a store."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    @property
    def name(self) -> str:
        """Its URL."""
        return self._remote.url

    def listing(self, *, check_sizes: bool = True) -> Listing:
        """See :class:`Place`."""
        return self._remote.listing(check_sizes=check_sizes)

    def below(self) -> tuple[Place, ...]:
        """See :class:`Place`."""
        return tuple(There(remote_at(f"{self.name}/{name}")) for name in self._remote.folders())

    def check(self, folder: str, file: LayerFile) -> None:
        """Fetched for that, one at a time."""
        with tempfile.TemporaryDirectory(prefix="varuna-check-") as place:
            self._fetch(folder, file, Path(place))

    @contextmanager
    def brought(self, checkpoint: Checkpoint) -> Iterator[Path]:
        """All of it, moments too, below the folder for temporary files; checked on the way."""
        with tempfile.TemporaryDirectory(prefix="varuna-brought-") as place:
            local = Path(place) / checkpoint.folder
            local.mkdir()
            for part in checkpoint.parts:
                for file in part.files:
                    try:
                        self._fetch(checkpoint.folder, file, local)
                    except Unusable as unusable:
                        at = f"{self.name}/{checkpoint.folder}/{file.name}"
                        raise StoreError(f"{at} {unusable.skipped.reason}") from unusable
                write_json(local / part_file(part.rank), part)
            yield local

    def _fetch(self, folder: str, file: LayerFile, to: Path) -> None:
        name = f"{folder}/{file.name}"
        if not self._remote.has(name):
            raise Unusable(to / file.name, "is missing", damaged=False)
        self._remote.fetch(name, to / file.name)
        check_content(to, file)
