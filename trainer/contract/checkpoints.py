"""The checkpoint folder: its names and its small JSON files.

    <root>/step-000120.g7[.kind]/layer-003.r2.safetensors   one layer's parameters, buffers, moments
                                /part-2.json                what rank 2 wrote: sizes, hashes, step
    <root>/gen-7.json                                       generation 7 began, and from where
    <root>/done.json                                        the job is over

Files are immutable and become visible whole (temporary name, fsync, rename), a part after its
layers. A checkpoint is *complete* when its parts cover every layer. What is there is read by
:mod:`trainer.contract.listing`.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import xxhash
from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from trainer.contract.durable import make_folder, write_whole
from trainer.contract.scaling import LossScale
from trainer.contract.spec import Frozen, ResumedFrom, Shape

DONE_FILE = "done.json"

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


def rank_of_part(name: str) -> int | None:
    """Whose part a file of this name is; None: it is none."""
    return int(match[1]) if (match := _PART.fullmatch(name)) else None


def is_part(name: str) -> bool:
    """Whether a file of this name is a part."""
    return rank_of_part(name) is not None


def marker_file(generation: int) -> str:
    """The name of ``generation``'s marker."""
    return f"gen-{generation}.json"


def generation_of_marker(name: str) -> int | None:
    """Whose marker a file of this name is; None: it is none."""
    return int(match[1]) if (match := _MARKER.fullmatch(name)) else None


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


def write_marker(root: str | Path, generation: int, resumed_from: ResumedFrom | None) -> None:
    """Say in ``root`` that ``generation`` begins; durable on return."""
    marker = Marker(generation=generation, resumed_from=resumed_from)
    write_json(Path(root) / marker_file(generation), marker)


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
