"""The checkpoint folder: its names, its small JSON files, how it is listed, and what it alone says
of the checkpoint to go on from.

    <root>/step-000120.g7[.kind]/layer-003.r2.safetensors   one layer's parameters, buffers, moments
                                /part-2.json                what rank 2 wrote: sizes, hashes, step
    <root>/gen-7.json                                       generation 7 began, and from where
    <root>/done.json                                        the job is over

Files are immutable and become visible whole (temporary name, fsync, rename), a part after its
layers. A checkpoint is *complete* when its parts cover every layer. Listing never raises on damage:
what is broken is skipped with a reason. The folder alone tells the whole story; no torch is needed.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import xxhash
from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from trainer.contract.durable import make_folder, write_whole
from trainer.contract.lineage import lineage, newest_complete
from trainer.contract.scaling import LossScale
from trainer.contract.spec import Frozen, ResumedFrom, Shape

DONE_FILE = "done.json"
OTHER_CONTENT = "has another content than was written (its hash differs)"
PIECE_BYTES = 1 << 20
"""Hashed while it is still in the processor's cache."""

_FOLDER = re.compile(r"step-([0-9]{6,15})\.g([1-9][0-9]{0,8})(?:\.([a-z]+))?")
_PART = re.compile(r"part-(0|[1-9][0-9]{0,8})\.json")
_MARKER = re.compile(r"gen-([1-9][0-9]{0,8})\.json")


@dataclass(frozen=True, order=True)
class FolderName:
    """The name of one checkpoint; ``kind`` is empty for a periodic one, else ``salvage``, …"""

    step: int
    generation: int
    kind: str = ""

    def __str__(self) -> str:
        return f"step-{self.step:06d}.g{self.generation}" + (f".{self.kind}" if self.kind else "")

    @classmethod
    def parse(cls, name: str) -> "FolderName | None":
        """The parts of ``name``, or None when it is not a checkpoint's."""
        if not (match := _FOLDER.fullmatch(name)):
            return None
        found = cls(int(match[1]), int(match[2]), match[3] or "")
        return found if str(found) == name else None


def layer_file(layer: int, rank: int) -> str:
    """The name of the file in which ``rank`` wrote ``layer``."""
    return f"layer-{layer:03d}.r{rank}.safetensors"


def part_file(rank: int) -> str:
    """The name of ``rank``'s part file."""
    return f"part-{rank}.json"


def is_part(name: str) -> bool:
    """Whether a file of this name is a part."""
    return _PART.fullmatch(name) is not None


def marker_file(generation: int) -> str:
    """The name of ``generation``'s marker."""
    return f"gen-{generation}.json"


class Sealed(Frozen):
    """A small JSON file that carries the hash of its own content."""

    checksum: str = ""

    def content_hash(self) -> str:
        """The SHA-256 of everything but the checksum."""
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()


class DataPosition(Frozen):
    """What fixes the sample order. With the step it says where the data stands: at global position
    ``step * batch_size``.
    """

    batch_size: int = Field(ge=1)
    seed: int
    samples: int = Field(ge=1)
    """``len(dataset)``."""
    fingerprint: str = ""
    """What the dataset says of its content (its attribute ``fingerprint``), as a text's hash."""


class Outside(Frozen):
    """What the model is called outside, so that its weights come in and go out."""

    names: dict[str, str] = Field(default_factory=dict)
    """The beginning of a global name -> the model's own: ``layers.3.block`` ->
    ``model.layers.2``.
    """
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """``config.json`` beside exported weights."""

    def renamed(self, name: str) -> str | None:
        """The model's own name of a global one: the longest dotted beginning that has a name is
        replaced, an empty name takes its dot along; None when none has.
        """
        words = name.split(".")
        for count in range(len(words), 0, -1):
            own = self.names.get(".".join(words[:count]))
            if own is not None:
                return ".".join([*([own] if own else []), *words[count:]])
        return None


class Committed(Frozen):
    """One step of the ledger: the range of global positions it took and the hash it reported."""

    step: int = Field(ge=1)
    first_position: int = Field(ge=0)
    samples: int = Field(ge=1)
    sample_ids_hash: str = Field(pattern=r"^[0-9a-f]{8}$")


class Hash(Protocol):
    """Of a file's bytes, piece by piece."""

    def update(self, piece: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class LayerFile(Frozen):
    """One layer's file as it must be found."""

    layer: int = Field(ge=0)
    name: str
    num_bytes: int = Field(ge=0)
    xxh3: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """XXH3 of 128 bits: it is to find damage, nobody's malice, and costs a tenth of SHA-256."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """In its stead in parts of format 1."""
    aliases: dict[str, Annotated[str, Field(pattern=r"^layers\.[0-9]+\.")]] = Field(
        default_factory=dict
    )
    """Tied weights that this layer holds but does not store: global name -> the owner's name."""

    @model_validator(mode="after")
    def _has_one_hash(self) -> Self:
        if (self.xxh3 is None) == (self.sha256 is None):
            raise ValueError("needs one hash: xxh3 or sha256")
        return self

    @model_serializer(mode="wrap")
    def _without_the_other_hash(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As format 1 was written: its checksums must hold."""
        absent = "sha256" if self.sha256 is None else "xxh3"
        return {name: value for name, value in whole(self).items() if name != absent}

    @property
    def content_hash(self) -> str:
        """Whichever it has."""
        return self.xxh3 or self.sha256 or ""

    def hashing(self) -> "Hash":
        """A fresh hash of the kind that it has."""
        return xxhash.xxh3_128() if self.xxh3 else hashlib.sha256()


class PartHeader(Sealed):
    """Where a checkpoint stands and who writes this part of it.

    After step ``step`` the LR schedule stands at ``step`` too: it is a pure function of it.
    """

    format: Literal[1, 2] = 2
    """1: layer files are hashed by SHA-256."""
    step: int = Field(ge=0)
    generation: int = Field(ge=1)
    kind: str = Field(default="", pattern=r"^[a-z]*$")
    rank: int = Field(ge=0)
    shape: Shape
    layer_count: int = Field(ge=1, le=1_000_000)
    resumed_from: ResumedFrom | None = None
    """What the writing generation resumed from; None for the first weights."""
    data: DataPosition
    committed: tuple[Committed, ...] = ()
    """The steps since the checkpoint before."""
    loss_scale: LossScale | None = None
    """With which the next step begins; None but in float16."""

    outside: Outside | None = Field(default=None, exclude_if=lambda outside: outside is None)

    @model_serializer(mode="wrap")
    def _without_a_scale(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As parts were written before there was one: their checksums must hold."""
        return {k: v for k, v in whole(self).items() if k != "loss_scale" or v is not None}

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder."""
        return str(FolderName(self.step, self.generation, self.kind))


class Part(PartHeader):
    """``part-<rank>.json``: one rank's share of a checkpoint, durable."""

    files: tuple[LayerFile, ...] = ()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        for file in self.files:
            if file.layer >= self.layer_count:
                raise ValueError(f"holds layer {file.layer} of {self.layer_count} layers")
            if file.name != layer_file(file.layer, self.rank):
                raise ValueError(f"names layer {file.layer}'s file {file.name!r}")
        if len({file.layer for file in self.files}) != len(self.files):
            raise ValueError("holds a layer twice")
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it holds."""
        return tuple(file.layer for file in self.files)

    @property
    def num_bytes(self) -> int:
        """The size of its layer files together."""
        return sum(file.num_bytes for file in self.files)


class Marker(Sealed):
    """``gen-<g>.json``, written before the generation's first step: it voids what an older one may
    still do past the point it resumed from.
    """

    format: Literal[1] = 1
    generation: int = Field(ge=1)
    resumed_from: ResumedFrom | None = None


class Done(Sealed):
    """``done.json``: the job succeeded; ``folder`` is its final checkpoint."""

    format: Literal[1] = 1
    step: int = Field(ge=0)
    folder: str


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
            elif match := _MARKER.fullmatch(name):
                numbers.append(int(match[1]))
                markers.append(_read_marker(root / name, int(match[1])))
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
    for match in filter(None, map(_PART.fullmatch, names)):
        try:
            part = _read_part(path, int(match[1]), layer_count)
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


def _read_part(folder: Path, rank: int, layer_count: int | None) -> Part:
    path = folder / part_file(rank)
    part = _read_json(path, Part)
    if part.folder != folder.name or part.rank != rank:
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


# --- The small files -------------------------------------------------------------------------


def write_marker(root: str | Path, generation: int, resumed_from: ResumedFrom | None) -> None:
    """Say in ``root`` that ``generation`` begins; durable on return."""
    marker = Marker(generation=generation, resumed_from=resumed_from)
    write_json(Path(root) / marker_file(generation), marker)


def newer_marker(root: str | Path, generation: int) -> int | None:
    """The highest generation above ``generation`` that has a marker, readable or not."""
    return newer_among(_names(Path(root)), generation)


def newer_among(names: Iterable[str], generation: int) -> int | None:
    """As :func:`newer_marker`, given the names that are in the root."""
    numbers = (int(match[1]) for name in names if (match := _MARKER.fullmatch(name)))
    return max((number for number in numbers if number > generation), default=None)


def write_done(root: str | Path, step: int, folder: str) -> None:
    """Say in ``root`` that the job is over."""
    write_json(Path(root) / DONE_FILE, Done(step=step, folder=folder))


def write_json(path: Path, content: Sealed) -> None:
    """Seal a small file and write it whole and durably, making its folder. Raises OSError."""
    make_folder(path.parent)
    write_whole(path, [sealed(content)])


def sealed(content: Sealed) -> bytes:
    """The bytes of a small file, its checksum in place."""
    whole = content.model_copy(update={"checksum": content.content_hash()})
    return whole.model_dump_json(indent=1).encode() + b"\n"
