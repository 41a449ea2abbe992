"""One layer's state as the bytes of a safetensors file, readable without us and without unpickling.

    parameters/<global name>        buffers/<global name>        optimizer/<global name>/<key>

Optimizer state that is no tensor (a step count, say) lies in the metadata as JSON. The format is
written and read here, not by the library, so that a layer is hashed while it streams to the disk
and is copied nowhere on its way in or out.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from trainer.contract.spec import Frozen
from trainer.program import ProgramError

Scalar = float | int | bool | str | None
Moments = dict[str, Tensor | Scalar]
"""What an optimizer keeps of one parameter."""
Fill = Callable[[memoryview], None]
"""Reads on: fills the whole of the memory that it is given."""

_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(Frozen):
    """What the header says of one tensor."""

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, dict[str, Any]])
_ENTRIES = TypeAdapter(dict[str, _Entry])
_SCALARS: TypeAdapter[dict[str, dict[str, Scalar]]] = TypeAdapter(dict[str, dict[str, Scalar]])


@dataclass(frozen=True)
class LayerState:
    """All that one layer is, by global name (``layers.3.norm.weight``)."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Non-persistent ones too."""
    optimizer: dict[str, Moments] = field(default_factory=dict)
    """Parameter -> what the optimizer keeps of it."""
    aliases: dict[str, str] = field(default_factory=dict)
    """A tied weight that this layer holds -> its owner's name (the lowest layer that holds it).

    It is stored with its owner alone.
    """


def placed(state: LayerState, place: Callable[[Tensor], Tensor]) -> LayerState:
    """The same elsewhere; what an optimizer keeps as a single number stays, for it may count on
    the host.
    """
    return LayerState(
        parameters={name: place(tensor) for name, tensor in state.parameters.items()},
        buffers={name: place(tensor) for name, tensor in state.buffers.items()},
        optimizer={
            name: {
                key: place(value) if isinstance(value, Tensor) and value.ndim else value
                for key, value in moments.items()
            }
            for name, moments in state.optimizer.items()
        },
        aliases=state.aliases,
    )


def encode(state: LayerState) -> Iterator[bytes | memoryview]:
    """The file's bytes, piece by piece. Aliased parameters are left out.

    Raises ProgramError when the state holds what cannot be stored.
    """
    tensors, scalars = _flattened(state)
    # The widest types first keep every tensor aligned, as the library does.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: {"optimizer": json.dumps(scalars)}}
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield _bytes_of(tensors[name].detach().cpu().contiguous())


def _flattened(state: LayerState) -> tuple[dict[str, Tensor], dict[str, dict[str, Scalar]]]:
    tensors = {
        f"parameters/{name}": p for name, p in state.parameters.items() if name not in state.aliases
    }
    tensors |= {f"buffers/{name}": buffer for name, buffer in state.buffers.items()}
    scalars: dict[str, dict[str, Scalar]] = {}
    for name, moments in state.optimizer.items():
        if name in state.aliases:
            continue
        scalars[name] = {}
        for key, value in moments.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            elif value is None or isinstance(value, float | int | str):
                scalars[name][key] = value
            else:
                raise ProgramError(
                    f"the optimizer keeps a {type(value).__name__} as {key!r} of {name}"
                )
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise ProgramError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}")
    return tensors, scalars


def decode(fill: Fill, num_bytes: int, aliases: dict[str, str] | None = None) -> LayerState:
    """The state in a file of ``num_bytes`` that ``fill`` reads in order.

    Nothing is copied: each tensor is filled in memory of its own, made by torch and so aligned as
    every tensor's. (In huge pages that took five times as long where the host had not backed them.)
    The file is not trusted yet. Raises ValueError when it is none of ours.
    """
    length = int.from_bytes(_read(fill, 8, num_bytes), "little")
    header = _HEADER.validate_json(bytes(_read(fill, length, num_bytes - 8)))
    kept = _SCALARS.validate_python(json.loads(header.pop(_METADATA, {}).get("optimizer", "")))
    state = LayerState(
        {}, {}, {name: dict(moments) for name, moments in kept.items()}, aliases or {}
    )
    at, there = 0, num_bytes - 8 - length
    for path, entry in _ENTRIES.validate_python(header).items():
        tensor = torch.empty(entry.shape, dtype=_dtype_of(entry, at, there))
        at += tensor.nbytes
        if tensor.nbytes:
            fill(_bytes_of(tensor))
        kind, name = path.split("/", 1)
        if kind == "optimizer":
            name, key = name.rsplit("/", 1)
            state.optimizer.setdefault(name, {})[key] = tensor
        else:
            (state.parameters if kind == "parameters" else state.buffers)[name] = tensor
    if at != there:
        raise ValueError(f"holds {there} bytes of tensors and names {at}")
    return state


def _read(fill: Fill, length: int, there: int) -> bytearray:
    if length > there:
        raise ValueError(f"needs {length} bytes where {there} are")
    data = bytearray(length)
    fill(memoryview(data))
    return data


def _dtype_of(entry: _Entry, at: int, there: int) -> torch.dtype:
    """Of the tensor that must begin ``at`` in the ``there`` bytes of all tensors."""
    dtype, (begin, end) = _DTYPES.get(entry.dtype), entry.data_offsets
    if dtype is None or begin != at or end > there:
        raise ValueError(f"a tensor of {entry.dtype} lies at {begin} .. {end}")
    if math.prod(entry.shape) * dtype.itemsize != end - begin:
        raise ValueError(f"a tensor of {entry.shape} does not have {end - begin} bytes")
    return dtype


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
