"""Carrying a checkpoint out to where nothing of ours is needed: a folder in, plain files out.

    python -I -m trainer.export DIR --to torch|hf [--step N] [--out PATH] [--names FILE] [--json]

DIR is a checkpoint, a job's folder (its newest one, or that of ``--step``) or a folder of one job;
a path or a URL. What is in a store is brought to the folder for temporary files first.

``torch`` gives one file with the state dict of the whole model; ``torch.load(weights_only=True)``
reads it. ``hf`` gives a folder of safetensors and their index, as Hugging Face reads them: a shard
at a time is in memory, and a tied weight is stored once, under its owner's name.

Names are the model's own where the checkpoint carries them (those of an ``hf:`` program do, and its
config comes along) or ``--names`` gives them; else the global ones.

Every file is checked against its size and hash while it is read, and what is written appears
whole at the end or not at all. Optimizer state stays behind. Apart from
:mod:`trainer.tools`, which needs no torch.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from trainer.checkpoint import CheckpointError, LayerState, read_header, read_layers
from trainer.contract.checkpoints import Outside
from trainer.contract.durable import sync_folder, temporary_name, write_whole
from trainer.contract.listing import Checkpoint, checkpoints, complete, to_resume
from trainer.contract.places import Place, place_at
from trainer.contract.remote import StoreError

DONE, FAILED, NOT_FOUND = 0, 1, 3
SHARD_BYTES = 4 * 2**30
"""A shard is full when the next layer would take it beyond."""
_NAMES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


class ExportError(Exception):
    """Why there is no export; a sentence."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Source:
    """One complete checkpoint, in a folder of this machine."""

    path: Path
    checkpoint: Checkpoint

    @property
    def layer_count(self) -> int:
        """How many layers the model has."""
        return self.checkpoint.layer_count


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: str
    step: int
    out: str
    tensors: int
    num_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one export; the exit code: 0, 1 when it failed, 3 when there is no checkpoint."""
    parser = argparse.ArgumentParser(prog="varuna checkpoint export")
    parser.add_argument("dir")
    parser.add_argument("--step", type=int)
    parser.add_argument("--to", choices=sorted(_WRITERS), required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        done = export(given.dir, given.to, given.out, given.names, given.step)
    except (ExportError, CheckpointError, StoreError) as error:
        print(f"Nothing was exported: {error}.", file=sys.stderr)
        return error.code if isinstance(error, ExportError) else FAILED
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of them
        print(f"Nothing was exported: {error}.", file=sys.stderr)
        return FAILED
    if given.json:
        print(json.dumps(vars(done)))
    else:
        print(
            f"{done.out}: {done.tensors:,} tensors, {done.num_bytes:,} bytes, "
            f"step {done.step:,} of {done.source}."
        )
    return DONE


def export(
    where: str, to: str, out: Path | None = None, names: Path | None = None, step: int | None = None
) -> Exported:
    """Write the checkpoint at ``where``, or of a job the newest one or that of ``step``, in the
    format ``to``.

    Raises ExportError, CheckpointError, StoreError, and what torch, safetensors and the disk raise;
    then nothing of it is left.
    """
    place, found = _chosen(where, step)
    out = out or Path(f"{place.name.rsplit('/', 1)[-1]}-{found.folder}{_SUFFIX[to]}")
    if out.exists():
        raise ExportError(f"{out} is there already")
    given = _read_names(names) if names else None
    with place.brought(found) as path:
        outside = read_header(path).outside or Outside()
        if given is not None:
            outside = outside.model_copy(update={"names": given})
        tensors, num_bytes = _WRITERS[to](Source(path, found), out, outside)
    return Exported(f"{place.name}/{found.folder}", found.step, str(out), tensors, num_bytes)


# --- Which checkpoint -------------------------------------------------------------------------


def _chosen(where: str, step: int | None) -> tuple[Place, Checkpoint]:
    """A complete checkpoint and the job's folder that it is in."""
    place, folder = place_at(where)
    if folder:
        found = next((c for c in checkpoints(place.listing()) if c.folder == folder), None)
        if found is None:
            raise ExportError(f"{where} holds no part of a checkpoint", NOT_FOUND)
        if not found.complete:
            missing = f"{len(found.missing)} of {found.layer_count}"
            raise ExportError(f"{where} is incomplete, {missing} layers are missing")
        return place, found
    jobs = [(root, root.listing()) for root in (place, *place.below())]
    jobs = [(root, listing) for root, listing in jobs if listing.newest_generation]
    if len(jobs) > 1:
        raise ExportError(f"{where} holds {len(jobs)} jobs: name one of them")
    for root, listing in jobs:
        if newest := to_resume(listing, step):
            return root, newest
        if there := sorted({c.step for c in complete(listing)}):
            known = ", ".join(f"{one:,}" for one in there)
            raise ExportError(f"{where} has no complete checkpoint of step {step}, but of {known}")
    raise ExportError(f"there is no complete checkpoint in {where}", NOT_FOUND)


# --- Under which names ------------------------------------------------------------------------


def _read_names(path: Path) -> dict[str, str]:
    try:
        return _NAMES.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ExportError(
            f'{path} must be a JSON object like {{"layers.0": "model.embed_tokens"}}'
        ) from error


def _renamed(outside: Outside, name: str) -> str:
    return outside.renamed(name) or name


class _Taken:
    """Refuses a name that was given before."""

    def __init__(self) -> None:
        self._by: dict[str, str] = {}

    def add(self, own: str, name: str) -> None:
        if own in self._by:
            raise ExportError(f"{self._by[own]} and {name} would both be named {own!r}")
        self._by[own] = name


# --- Writing ----------------------------------------------------------------------------------


def _to_torch(source: Source, out: Path, outside: Outside) -> tuple[int, int]:
    """One state dict; a tied weight is there under each of its names and stored once."""
    taken, model = _Taken(), dict[str, Tensor]()
    for state in read_layers(source.path, range(source.layer_count)).values():
        for name, tensor in (state.parameters | _buffers(state, outside)).items():
            own = _renamed(outside, name)
            taken.add(own, name)
            model[own] = tensor
    temporary = temporary_name(out)
    try:
        torch.save(model, temporary)
        _publish(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(model), out.stat().st_size


def _to_hf(source: Source, out: Path, outside: Outside) -> tuple[int, int]:
    """Shards named ``model-00001-of-00003.safetensors``, ``model.safetensors.index.json``, and
    ``config.json`` when there is one.
    """
    temporary = temporary_name(out)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    taken, tied, shards = _Taken(), dict[str, str](), list[list[str]]()
    num_bytes = 0
    try:
        for shard in _shards(source, tied, outside):
            own: dict[str, Tensor] = {}
            for name, tensor in shard.items():
                taken.add(_renamed(outside, name), name)
                own[_renamed(outside, name)] = tensor.contiguous()
                num_bytes += tensor.nbytes
            path = temporary / f"{len(shards)}"
            safetensors.torch.save_file(own, path, metadata={"format": "pt"})
            shards.append(list(own))
        weight_map: dict[str, str] = {}
        for index, own_names in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            (temporary / str(index)).rename(temporary / file)
            weight_map |= dict.fromkeys(own_names, file)
        about = {
            "total_size": num_bytes,
            "step": source.checkpoint.step,
            "tied": {_renamed(outside, a): _renamed(outside, owner) for a, owner in tied.items()},
        }
        index_file = json.dumps({"metadata": about, "weight_map": weight_map}, indent=1)
        write_whole(temporary / "model.safetensors.index.json", [index_file.encode()])
        if outside.config:
            config = json.dumps(outside.config, indent=2, sort_keys=True)
            write_whole(temporary / "config.json", [config.encode()])
        _publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return len(weight_map), num_bytes


def _shards(source: Source, tied: dict[str, str], outside: Outside) -> Iterator[dict[str, Tensor]]:
    """What each shard holds, by global name; ``tied`` collects the names that are left out."""
    shard: dict[str, Tensor] = {}
    size = 0
    for layer in range(source.layer_count):
        state = read_layers(source.path, [layer])[layer]
        tied |= state.aliases
        own = _own(state) | _buffers(state, outside)
        bytes_ = sum(tensor.nbytes for tensor in own.values())
        if shard and size + bytes_ > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard |= own
        size += bytes_
    yield shard


def _own(state: LayerState) -> dict[str, Tensor]:
    return {n: p for n, p in state.parameters.items() if n not in state.aliases}


def _buffers(state: LayerState, outside: Outside) -> dict[str, Tensor]:
    """Those that a model made from the config does not compute itself, as rotary tables."""
    is_made_anew = bool(outside.config)
    return {n: b for n, b in state.buffers.items() if not is_made_anew or outside.renamed(n)}


def _publish(temporary: Path, out: Path) -> None:
    """Make what lies at ``temporary`` visible at ``out``, durably, unless something is there."""
    files = sorted(temporary.iterdir()) if temporary.is_dir() else [temporary]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if out.exists():
        raise ExportError(f"{out} is there already")
    temporary.rename(out)
    sync_folder(out.parent)


_WRITERS: Mapping[str, Callable[[Source, Path, Outside], tuple[int, int]]] = {
    "torch": _to_torch,
    "hf": _to_hf,
}
_SUFFIX: Mapping[str, str] = {"torch": ".pt", "hf": ""}


if __name__ == "__main__":
    sys.exit(main())
