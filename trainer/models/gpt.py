"""A small decoder that predicts the next byte of a text: ``builtin:gpt``.

A program like a user's: embedding, ``layers`` blocks (pre-norm, causal attention, MLP), final norm
and head. The head shares the embedding's weight unless ``tied`` is false. No layer keeps a buffer.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer import corpus
from trainer.contract.builtins import GPT_LAYERS

DEFAULTS: dict[str, Any] = {
    "layers": GPT_LAYERS,
    "width": 128,
    "heads": 4,
    "context": 128,
    "vocab": 256,
    "tied": True,
    "lr": 1e-3,
    "weight_decay": 0.01,
    "warmup": 20,  # steps until the full learning rate
    "decay": 0,  # steps until a tenth of it, along a cosine; 0: never
    "text": None,  # path of a file; None: the default corpus
}
HELD_OUT = 0.05


def layers(args: dict[str, Any]) -> list[nn.Module]:
    """The embedding, the blocks, and the head."""
    config = settings(args)
    width, heads = config["width"], config["heads"]
    if width % heads:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    embedding = Embedding(config["vocab"], config["context"], width)
    blocks = [Block(width, heads, depth=config["layers"]) for _ in range(config["layers"])]
    head = Head(config["vocab"], width)
    if config["tied"]:
        head.weight = embedding.tokens
    return [embedding, *blocks, head]


def dataset(args: dict[str, Any]) -> "Windows":
    """All of the text but its end."""
    text, context = read_text(args), settings(args)["context"]
    return Windows(text[: -max(1, int(len(text) * HELD_OUT))], context)


def eval_dataset(args: dict[str, Any]) -> "Windows":
    """The end of the text."""
    text, context = read_text(args), settings(args)["context"]
    return Windows(text[-max(1, int(len(text) * HELD_OUT)) :], context)


def inputs(batch: dict[str, Tensor]) -> Tensor:
    """All tokens but the last, which is only to be predicted."""
    return batch["tokens"][:, :-1]


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy in nats, summed over all predicted bytes."""
    targets = batch["tokens"][:, 1:]
    total = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def lr_scale(step: int, args: dict[str, Any]) -> float:
    """A linear warm-up, then a cosine down to a tenth when ``decay`` is given."""
    config = settings(args)
    if step < config["warmup"]:
        return step / float(config["warmup"])
    if not config["decay"]:
        return 1.0
    way = min(1.0, (step - config["warmup"]) / max(1, config["decay"] - config["warmup"]))
    return 0.55 + 0.45 * math.cos(math.pi * way)


def settings(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their defaults; one of another name is an error."""
    if unknown := sorted(set(args) - set(DEFAULTS)):
        raise ValueError(f"unknown argument {unknown[0]!r}; there are: {', '.join(DEFAULTS)}")
    return DEFAULTS | args


def read_text(args: dict[str, Any]) -> bytes:
    """The text to train on."""
    path = settings(args)["text"]
    return Path(path).read_bytes() if path else corpus.text()


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Stretches of ``context`` + 1 bytes; each byte but the first is predicted once."""

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes is too short for the context {context}")
        self.fingerprint = f"{len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}"
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._context
        return {"tokens": self._text[start : start + self._context + 1].long()}


class Embedding(nn.Module):
    """Tokens (samples, length) -> (samples, length, width), with learned positions."""

    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocab, width))
        self.positions = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.tokens, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]


class Block(nn.Module):
    """Attention, then an MLP, each on the normed input and added to it."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = _linear(width, 3 * width)
        self.attention_out = _linear(width, width, std=0.02 / math.sqrt(2 * depth))
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = _linear(width, 4 * width)
        self.mlp_out = _linear(4 * width, width, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        x = x + self.mlp_out(hidden)
        return x

    def _attend(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        per_head = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = per_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(samples, length, width))
        return out


class Head(nn.Module):
    """The final norm, and a score for each token."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.empty(vocab, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)


def _linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    # Without biases: a key's has no effect, so its gradient is noise that Adam would amplify.
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=std)
    return linear
