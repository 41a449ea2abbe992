"""What the builtin language models share: their arguments, the text cut into windows, the learning
rate.

A token is a byte of the text, or a number of a NumPy file.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from trainer import corpus

HELD_OUT = 0.05
"""Of the text, its end: for evaluation."""
_HASHED_WHOLE = 64 << 20
"""Bytes; of a longer text evenly spread pieces are hashed: every rank does it at every start."""
_PIECES, _PIECE = 1024, 4096


def settings(args: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their defaults; one of another name is an error."""
    if unknown := sorted(set(args) - set(defaults)):
        raise ValueError(f"unknown argument {unknown[0]!r}; there are: {', '.join(defaults)}")
    return {**defaults, **args}


def lr_scale(step: int, config: Mapping[str, Any]) -> float:
    """A linear warm-up, then a cosine down to a tenth when ``decay`` is given."""
    if step < config["warmup"]:
        return step / float(config["warmup"])
    if not config["decay"]:
        return 1.0
    way = min(1.0, (step - config["warmup"]) / max(1, config["decay"] - config["warmup"]))
    return 0.55 + 0.45 * math.cos(math.pi * way)


def all_but_the_last(batch: Mapping[str, Tensor]) -> Tensor:
    """What a model sees that predicts the next token: the last one is only to be predicted."""
    return batch["tokens"][:, :-1]


def next_token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy in nats, summed over all predicted tokens; how many they are."""
    targets = batch["tokens"][:, 1:]
    total = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def to_train_on(tokens: Tensor, config: Mapping[str, Any]) -> "Windows":
    """All but the end."""
    return Windows(tokens[: -_held_out(tokens)], config["context"])


def to_evaluate_on(tokens: Tensor, config: Mapping[str, Any]) -> "Windows":
    """The end, or ``held_out`` samples of it: an evaluation should not take longer than what lies
    between two.
    """
    return Windows(tokens[-_held_out(tokens) :], config["context"], config["held_out"])


def _held_out(tokens: Tensor) -> int:
    return max(1, int(len(tokens) * HELD_OUT))


def read_bytes(path: str | Path | None) -> Tensor:
    """The bytes of a file, or of the default corpus."""
    return torch.frombuffer(
        bytearray(Path(path).read_bytes() if path else corpus.text()), dtype=torch.uint8
    )


def read_numbers(path: str | Path) -> Tensor:
    """The whole numbers of a one-dimensional ``.npy`` file; they stay on the disk until read."""
    numbers = numpy.load(path, mmap_mode="c", allow_pickle=False)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{path} must hold a row of whole numbers, not {numbers.dtype} {numbers.shape}"
        )
    return torch.from_numpy(numbers)


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Stretches of ``context`` + 1 tokens; each token but the first is predicted once, unless there
    are more than ``most`` of them: then so many, evenly spread.
    """

    def __init__(self, tokens: Tensor, context: int, most: int | None = None) -> None:
        if len(tokens) <= context:
            raise ValueError(
                f"a text of {len(tokens)} tokens is too short for the context {context}"
            )
        self.fingerprint = f"{tokens.nbytes} bytes, sha256 {_sha256(tokens)}"
        self._tokens = tokens
        self._context = context
        self._fitting = (len(tokens) - 1) // context
        self._taken = min(self._fitting, most or self._fitting)

    def __len__(self) -> int:
        return self._taken

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._fitting // self._taken * self._context
        return {"tokens": self._tokens[start : start + self._context + 1].long()}


def _sha256(tokens: Tensor) -> str:
    data = tokens.view(torch.uint8).numpy().data
    if len(data) <= _HASHED_WHOLE:
        return hashlib.sha256(data).hexdigest()
    places = (i * (len(data) - _PIECE) // (_PIECES - 1) for i in range(_PIECES))
    hash_ = hashlib.sha256()
    for place in places:
        hash_.update(data[place : place + _PIECE])
    return hash_.hexdigest()
