"""One layer's state as the bytes of a safetensors file, readable without us and without unpickling.

    parameters/<global name>        buffers/<global name>        optimizer/<global name>/<key>

Optimizer state that is no tensor (a step count, say) lies in the metadata as JSON. The format is
written and read here, not by the library, so that a layer is hashed while it streams to the disk
and is copied nowhere on its way in or out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.program import ProgramError

Scalar = float | int | bool | str | None
Moments = dict[str, Tensor | Scalar]
"""What an optimizer keeps of one parameter."""

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


def encode(state: LayerState) -> Iterator[bytes | memoryview]:
    """The file's bytes, piece by piece. Aliased parameters are left out.

    Raises ProgramError when the state holds what cannot be stored.
    """
    tensors, scalars = _flattened(state)
    # The widest types first keep every tensor aligned, as the library does.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"optimizer": json.dumps(scalars)}}
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
        on_host = tensors[name].detach().cpu().contiguous()
        yield on_host.reshape(-1).view(torch.uint8).numpy().data


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


def decode(data: bytearray, aliases: dict[str, str] | None = None) -> LayerState:
    """The state in ``data``, whose content is known to be what was written.

    The tensors live in ``data`` itself; nothing is copied.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    scalars = json.loads(header.pop("__metadata__")["optimizer"])
    state = LayerState({}, {}, scalars, aliases or {})
    for path, entry in header.items():
        tensor = _tensor(data, 8 + length, entry)
        kind, name = path.split("/", 1)
        if kind == "optimizer":
            name, key = name.rsplit("/", 1)
            state.optimizer[name][key] = tensor
        else:
            (state.parameters if kind == "parameters" else state.buffers)[name] = tensor
    return state


def _tensor(data: bytearray, start: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).reshape(shape)
