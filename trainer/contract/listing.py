"""How a checkpoint folder is read, and what it alone says of the checkpoint to go on from.

Listing never raises on damage: what is broken is skipped with a reason. The folder alone tells the
whole story; no torch is needed.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from trainer.contract.checkpoints import (
    DONE_FILE,
    Done,
    FolderName,
    LayerFile,
    Marker,
    Part,
    generation_of_marker,
    is_part,
    part_file,
)
from trainer.contract.lineage import lineage, newest_complete
from trainer.contract.spec import ResumedFrom

OTHER_CONTENT = "has another content than was written (its hash differs)"
PIECE_BYTES = 1 << 20
"""Hashed while it is still in the processor's cache."""


@dataclass(frozen=True)
class Skipped:
    """A file that is of no use, which takes its part with it; ``path`` is relative to the root."""

    path: str
    reason: str
    damaged: bool = True
    """Its content is wrong and stays so; else it is missing or cannot be read, which may pass."""


class Unusable(Exception):  # noqa: N818 - it says what a file is, and is caught, not shown
    """Something in a checkpoint folder cannot be used."""

    def __init__(self, path: Path, reason: str, *, damaged: bool = True) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.skipped = Skipped(path.name, reason, damaged)


@dataclass(frozen=True)
class Listing:
    """What a job's checkpoint folder holds. Sizes are checked, hashes are not."""

    root: str
    parts: tuple[Part, ...] = ()
    markers: tuple[Marker, ...] = ()
    done: Done | None = None
    skipped: tuple[Skipped, ...] = ()
    newest_generation: int = 0
    """The highest number that any marker or folder carries, damaged ones too: numbers never come
    back. 0: none.
    """


@dataclass(frozen=True)
class Checkpoint:
    """All usable parts of one folder."""

    folder: str
    step: int
    generation: int
    layer_count: int
    parts: tuple[Part, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The layers that no part holds."""
        held = {layer for part in self.parts for layer in part.layers}
        return tuple(layer for layer in range(self.layer_count) if layer not in held)

    @property
    def complete(self) -> bool:
        """Whether the parts cover every layer."""
        return not self.missing

    @property
    def num_bytes(self) -> int:
        """The size of all layer files."""
        return sum(part.num_bytes for part in self.parts)


# --- Listing ---------------------------------------------------------------------------------


def scan(root: str | Path, layer_count: int | None = None, *, check_sizes: bool = True) -> Listing:
    """List the job's folder ``root``; ``layer_count``, when known, condemns parts of another model.

    A missing folder is an empty one. Raises OSError only when ``root`` itself cannot be read.
    Without ``check_sizes`` the layer files are not looked at; then the caller checks them.
    """
    root = Path(root)
    parts: list[Part] = []
    markers: list[Marker] = []
    done: Done | None = None
    skipped: list[Skipped] = []
    numbers = [0]
    for name in _names(root):
        try:
            if folder := FolderName.parse(name):
                numbers.append(folder.generation)
                found, wrong = read_folder(root / name, layer_count, check_sizes=check_sizes)
                parts += found
                skipped += (replace(s, path=f"{name}/{s.path}") for s in wrong)
            elif generation := generation_of_marker(name):
                numbers.append(generation)
                markers.append(_read_marker(root / name, generation))
            elif name == DONE_FILE:
                done = _read_json(root / name, Done)
        except Unusable as unusable:
            skipped.append(unusable.skipped)
    markers.sort(key=lambda marker: marker.generation)
    return Listing(str(root), tuple(parts), tuple(markers), done, tuple(skipped), max(numbers))


def read_folder(
    path: Path, layer_count: int | None = None, *, check_sizes: bool = True
) -> tuple[tuple[Part, ...], tuple[Skipped, ...]]:
    """The usable parts of one checkpoint folder by rank, and what is skipped of it and why.

    Paths of what is skipped are relative to the folder. Raises Unusable when it is not a folder.
    """
    parts: list[Part] = []
    skipped: list[Skipped] = []
    try:
        names = _names(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    for name in filter(is_part, names):
        try:
            part = _read_part(path, name, layer_count)
            for file in part.files if check_sizes else ():
                check_size(path, file)
            parts.append(part)
        except Unusable as unusable:
            skipped.append(unusable.skipped)
    agreeing, odd = _that_agree(sorted(parts, key=lambda p: p.rank))
    return agreeing, (*skipped, *odd)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _read_part(folder: Path, name: str, layer_count: int | None) -> Part:
    path = folder / name
    part = _read_json(path, Part)
    if part.folder != folder.name or part_file(part.rank) != name:
        raise Unusable(path, f"is rank {part.rank}'s of {part.folder}")
    if layer_count is not None and part.layer_count != layer_count:
        raise Unusable(path, f"is of a model with {part.layer_count} layers, not {layer_count}")
    return part


def _that_agree(parts: list[Part]) -> tuple[tuple[Part, ...], tuple[Skipped, ...]]:
    """Parts of one folder must tell one story of model, data and lineage.

    The story that most tell is believed; when two are told equally often, none is.
    """
    stories = {p.rank: (p.layer_count, p.data, p.shape, p.resumed_from) for p in parts}
    told = Counter(stories.values()).most_common(2)
    if len(told) < 2:
        return tuple(parts), ()
    believed = told[0][0] if told[0][1] > told[1][1] else None
    odd = tuple(
        Skipped(part_file(p.rank), "disagrees with the other parts about model, data or lineage")
        for p in parts
        if stories[p.rank] != believed
    )
    return tuple(p for p in parts if stories[p.rank] == believed), odd


def _read_marker(path: Path, generation: int) -> Marker:
    marker = _read_json(path, Marker)
    if marker.generation != generation:
        raise Unusable(path, f"is generation {marker.generation}'s")
    return marker


_M = TypeVar("_M", Part, Marker, Done)


def _read_json(path: Path, model: type[_M]) -> _M:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not text:
        raise Unusable(path, "is empty")
    try:
        found = model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(place) for place in first["loc"])
        said = f"{where}: {first['msg']}" if where else first["msg"]
        raise Unusable(path, f"cannot be used: {said}") from error
    if found.checksum != found.content_hash():
        raise Unusable(path, OTHER_CONTENT)
    return found


def check_size(folder: Path, file: LayerFile) -> None:
    """Raise Unusable unless ``file`` is in ``folder`` with the right size."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if size != file.num_bytes:
        raise Unusable(path, f"has {size} bytes instead of {file.num_bytes}")


def check_content(folder: Path, file: LayerFile) -> None:
    """Raise Unusable unless ``file`` has the right size and hash. Reads it all."""
    check_size(folder, file)
    path, found = folder / file.name, file.hashing()
    try:
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                found.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    if found.hexdigest() != file.content_hash:
        raise Unusable(path, OTHER_CONTENT)


def _unreadable(path: Path, error: OSError) -> Unusable:
    missing = isinstance(error, FileNotFoundError)
    reason = "is missing" if missing else f"cannot be read: {error.strerror}"
    return Unusable(path, reason, damaged=False)


def checkpoints(listing: Listing) -> tuple[Checkpoint, ...]:
    """The folders that hold at least one usable part, by step and generation."""
    by_folder: dict[str, list[Part]] = {}
    for part in listing.parts:
        by_folder.setdefault(part.folder, []).append(part)
    found = (
        Checkpoint(folder, parts[0].step, parts[0].generation, parts[0].layer_count, tuple(parts))
        for folder, parts in by_folder.items()
    )
    return tuple(sorted(found, key=lambda c: (c.step, c.generation, c.folder)))


def complete(listing: Listing) -> tuple[Checkpoint, ...]:
    """The folders whose parts cover every layer, by step and generation."""
    return tuple(c for c in checkpoints(listing) if c.complete)


# --- Going on from the folder alone ---------------------------------------------------------


def links_of(listing: Listing) -> dict[int, ResumedFrom | None]:
    """What the folder alone knows of each generation's origin.

    A marker alone makes a link here: it was written just before a first step, and nobody is left to
    say that none was committed. To resume further back is safe, to revive voided steps is not.
    """
    links = {part.generation: part.resumed_from for part in listing.parts}
    return links | {marker.generation: marker.resumed_from for marker in listing.markers}


def to_resume(listing: Listing, step: int | None = None) -> Checkpoint | None:
    """The checkpoint that the folder alone says to go on from; with ``step``: the one at it."""
    usable = [c for c in complete(listing) if step is None or c.step == step]
    return newest_complete(usable, lineage(links_of(listing)))


def newer_marker(root: str | Path, generation: int) -> int | None:
    """The highest generation above ``generation`` that has a marker, readable or not."""
    return newer_among(_names(Path(root)), generation)


def newer_among(names: Iterable[str], generation: int) -> int | None:
    """As :func:`newer_marker`, given the names that are in the root."""
    numbers = (number for name in names if (number := generation_of_marker(name)))
    return max((number for number in numbers if number > generation), default=None)
