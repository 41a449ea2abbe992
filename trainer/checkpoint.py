"""Writing and reading checkpoints per LAYER, so that the shape may change in between.

Each rank writes its own part and waits for nobody; a checkpoint is complete when the parts cover
the model (:mod:`trainer.contract.checkpoints` has the layout and the rules). Files become visible
whole and durable, the part after its layers. What is read is checked against the size and the
hash it was written with.

    CheckpointError
      DamagedError        the content of a file is wrong: go back to another checkpoint
      UnreachableError    a file is missing or cannot be read: may pass
      SaveError           a part or marker could not be written (a full disk, say); nothing of
                          it is left
    StaleError            a newer generation has begun
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash
from pydantic import ValidationError

from trainer.contract import checkpoints
from trainer.contract.checkpoints import (
    LayerFile,
    Part,
    PartHeader,
    layer_file,
    part_file,
    write_json,
)
from trainer.contract.durable import make_folder, sync_folder, temporary_name, write_synced
from trainer.contract.listing import (
    OTHER_CONTENT,
    PIECE_BYTES,
    Skipped,
    Unusable,
    check_size,
    newer_marker,
    read_folder,
)
from trainer.contract.progress import PartWritten
from trainer.contract.spec import ResumedFrom
from trainer.device import CPU, Device
from trainer.layerfile import LayerState, decode, encode, placed

__all__ = [
    "CheckpointError",
    "DamagedError",
    "LayerState",
    "SaveError",
    "StaleError",
    "UnreachableError",
    "read_header",
    "read_layers",
    "refuse_stale",
    "write_marker",
    "write_part",
]

_AT_ONCE = 4
"""Layers that are written or read side by side."""


class CheckpointError(Exception):
    """A checkpoint cannot be read or written; ``file`` is the one at fault."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = str(file)


class DamagedError(CheckpointError):
    """A file's content is not what was written."""


class UnreachableError(CheckpointError):
    """A file is missing or cannot be read."""


class SaveError(CheckpointError):
    """A part or a marker could not be written."""


class StaleError(Exception):
    """A newer generation has begun: what this one writes is void."""


def write_marker(root: str | Path, generation: int, resumed_from: ResumedFrom | None) -> None:
    """Say in ``root`` that ``generation`` begins; durable on return. Raises SaveError."""
    try:
        checkpoints.write_marker(root, generation, resumed_from)
    except OSError as error:
        marker = Path(root) / checkpoints.marker_file(generation)
        raise SaveError(marker, f"could not be written: {error.strerror}") from error


def write_part(
    root: str | Path, folder: str, header: PartHeader, layers: Mapping[int, LayerState]
) -> PartWritten:
    """Write this rank's ``layers`` into ``folder`` below ``root``; durable on return.

    A part never changes; only a salvaged one grows when its rank is asked for more layers, and is
    replaced whole then. Raises SaveError or StaleError (then nothing is left of what is new), and
    ProgramError for state of a kind that no file can hold.
    """
    if folder != header.folder:
        raise ValueError(f"the header is for {header.folder}, not {folder}")
    began = time.monotonic()
    path = Path(root) / folder
    part = path / part_file(header.rank)
    before = _written_before(part, header)
    new = [layer for layer in layers if layer not in {file.layer for file in before}]
    mine = [path / layer_file(layer, header.rank) for layer in new]
    try:
        refuse_stale(root, header.generation)
        make_folder(path)
        # Side by side: while one layer waits for the disk, the next is hashed.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            writing = [
                pool.submit(_write_layer, path, header.rank, layer, layers[layer]) for layer in new
            ]
        written = [one.result() for one in writing]
        for file in mine:
            temporary_name(file).rename(file)
        sync_folder(path)
        refuse_stale(root, header.generation)  # it may have been stopped on its way here
        if not os.path.exists(Path(root) / checkpoints.marker_file(header.generation)):
            # Somebody deleted the folder under us: what is new in it is to tell the whole story.
            checkpoints.write_marker(root, header.generation, header.resumed_from)
        write_json(part, whole := Part(**dict(header), files=(*before, *written)))
    except BaseException as error:
        _tidy_up(mine if before else [part, *mine])
        if isinstance(error, OSError):
            raise SaveError(part, f"could not be written: {error.strerror}") from error
        raise
    return PartWritten(
        folder=folder,
        step=header.step,
        layers=whole.layers,
        layer_count=header.layer_count,
        num_bytes=whole.num_bytes,
        seconds=time.monotonic() - began,
    )


def refuse_stale(root: str | Path, generation: int) -> None:
    """Raise StaleError when a generation after ``generation`` has its marker in ``root``."""
    if newer := newer_marker(root, generation):
        raise StaleError(f"generation {newer} has begun")


def _written_before(part: Path, header: PartHeader) -> tuple[LayerFile, ...]:
    if not os.path.exists(part):
        return ()
    if not header.kind:
        raise SaveError(part, "is written already, and parts never change")
    try:
        return Part.model_validate_json(part.read_bytes()).files
    except (OSError, ValidationError) as error:
        raise SaveError(part, "is there and cannot be read") from error


def _write_layer(folder: Path, rank: int, layer: int, state: LayerState) -> LayerFile:
    """Write one layer under its temporary name, hashing what streams by."""
    name = layer_file(layer, rank)
    digest = xxhash.xxh3_128()
    num_bytes = 0

    def seen() -> Iterator[bytes | memoryview]:
        nonlocal num_bytes
        for piece in encode(state):
            digest.update(piece)
            num_bytes += len(piece)
            yield piece

    write_synced(temporary_name(folder / name), seen())
    return LayerFile(
        layer=layer,
        name=name,
        num_bytes=num_bytes,
        xxh3=digest.hexdigest(),
        aliases=state.aliases,
    )


def _tidy_up(files: Iterable[Path]) -> None:
    """Remove what a failed save has left, as far as that can be done."""
    for file in files:
        with suppress(OSError):
            temporary_name(file).unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def read_header(folder: str | Path) -> PartHeader:
    """Where the checkpoint stands. Raises DamagedError or UnreachableError."""
    parts, skipped = _read_parts(Path(folder))
    if not parts:
        raise _lost(Path(folder), skipped, "has no part")
    return parts[0]


def read_layers(
    folder: str | Path, layers: Iterable[int], device: Device = CPU
) -> dict[int, LayerState]:
    """The state of ``layers`` from the checkpoint ``folder``, whatever shape wrote it, each moved
    to ``device`` as soon as it is read.

    A tied weight is there in every layer that holds it, as the same tensors as its owner's; so
    ``parameters`` has all of a layer's names and ``aliases`` says which are not its own. Raises
    DamagedError or UnreachableError, which name the file.
    """
    path = Path(folder)
    parts, skipped = _read_parts(path)
    files = {file.layer: file for part in reversed(parts) for file in part.files}

    def read(layer: int) -> LayerState:
        if layer not in files:
            raise _lost(path, skipped, f"has no part that holds layer {layer}")
        return placed(_read_layer(path, files[layer]), device.place)

    wanted = tuple(layers)
    owners = [_layer_of(o) for i in wanted if i in files for o in files[i].aliases.values()]
    needed = tuple(dict.fromkeys([*wanted, *owners]))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = dict(zip(needed, pool.map(read, needed), strict=True))
    for layer in wanted:
        state = states[layer]
        for name, owner in state.aliases.items():
            owning = states[_layer_of(owner)]
            if owner not in owning.parameters:
                where = path / files[layer].name
                raise DamagedError(where, f"borrows {owner}, which its layer does not have")
            state.parameters[name] = owning.parameters[owner]
            if owner in owning.optimizer:
                state.optimizer[name] = owning.optimizer[owner]
    return {layer: states[layer] for layer in wanted}


def _layer_of(name: str) -> int:
    """The layer of a global name, ``layers.<index>.…``."""
    return int(name.split(".", 2)[1])


def _read_parts(path: Path) -> tuple[tuple[Part, ...], tuple[Skipped, ...]]:
    try:
        return read_folder(path)
    except Unusable as unusable:
        raise _failure(path.parent, unusable.skipped) from unusable


def _read_layer(folder: Path, file: LayerFile) -> LayerState:
    """The layer in ``file``, whose size and hash are right."""
    path = folder / file.name
    digest = file.hashing()
    try:
        check_size(folder, file)
        with path.open("rb", buffering=0) as opened:

            def fill(room: memoryview) -> None:
                while room:
                    count = opened.readinto(room[:PIECE_BYTES])
                    if not count:
                        raise ValueError("ends early")
                    digest.update(room[:count])
                    room = room[count:]

            state = decode(fill, file.num_bytes, file.aliases)
    except Unusable as unusable:
        raise _failure(folder, unusable.skipped) from unusable
    except OSError as error:
        raise UnreachableError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedError(path, OTHER_CONTENT) from error
    if digest.hexdigest() != file.content_hash:
        raise DamagedError(path, OTHER_CONTENT)
    return state


def _lost(folder: Path, skipped: tuple[Skipped, ...], otherwise: str) -> CheckpointError:
    """Why a layer is not to be had: by damage, if there is any in the folder."""
    worst = sorted(skipped, key=lambda s: not s.damaged)
    return _failure(folder, worst[0]) if worst else UnreachableError(folder, otherwise)


def _failure(folder: Path, skipped: Skipped) -> CheckpointError:
    kind = DamagedError if skipped.damaged else UnreachableError
    return kind(folder / skipped.path, skipped.reason)
