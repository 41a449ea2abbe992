"""A small encoder that restores hidden bytes of a text: ``builtin:bert``, a masked language model.

Of each sample 15 % of the places are chosen (``masked``, at least one): 80 % of them show the mask,
10 % another byte, 10 % what stands there; the loss is over the chosen alone. Who draws them is
torch's generator, which is seeded by (seed, the sample's position) around each sample: the first
stage hides what the last one asks for, and no two epochs hide the same.

Blocks are post-norm as in the paper (arXiv 1810.04805); the decoder shares the embedding's weight
unless ``tied`` is false.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.contract.builtins import BERT
from trainer.dropout import Dropout
from trainer.models import text
from trainer.models.blocks import Attention, Embedding, Mlp, linear, weight

BYTES = 256
MASK = BYTES
"""The token that hides another; one more than there are bytes."""
VOCAB = BYTES + 1
_NOT_ASKED = -100


def layers(args: dict[str, Any]) -> list[nn.Module]:
    """The embedding, the blocks, and the decoder."""
    config = settings(args)
    width, dropout = config["width"], config["dropout"]
    embedding = Embedding(VOCAB, config["context"], width, dropout)
    blocks = [
        Block(width, config["heads"], config["layers"], dropout) for _ in range(config["layers"])
    ]
    decoder = Decoder(width)
    if config["tied"]:
        decoder.weight = embedding.tokens
    return [nn.Sequential(embedding, nn.LayerNorm(width)), *blocks, decoder]


def dataset(args: dict[str, Any]) -> "Masked":
    """All of the text but its end."""
    config = settings(args)
    return Masked(text.to_train_on(text.read_bytes(config["text"]), config), config["masked"])


def eval_dataset(args: dict[str, Any]) -> "Masked":
    """Of the end of the text, ``held_out`` samples."""
    config = settings(args)
    return Masked(text.to_evaluate_on(text.read_bytes(config["text"]), config), config["masked"])


def inputs(batch: dict[str, Tensor]) -> Tensor:
    """The text with its holes."""
    return batch["tokens"]


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, float]]:
    """The cross-entropy in nats, summed over all chosen places; which part of them is right."""
    targets = batch["targets"]
    asked = targets != _NOT_ASKED
    total = functional.cross_entropy(output[asked], targets[asked], reduction="sum")
    right = (output[asked].argmax(-1) == targets[asked]).float().mean()
    return total, int(asked.sum()), {"accuracy": right.item()}


def lr_scale(step: int, args: dict[str, Any]) -> float:
    """A linear warm-up, then a cosine down to a tenth when ``decay`` is given."""
    return text.lr_scale(step, settings(args))


def settings(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their defaults; one of another name is an error."""
    config = text.settings(args, BERT)
    if not 0 < config["masked"] < 1:
        raise ValueError(f"masked is a part between 0 and 1, not {config['masked']}")
    return config


class Masked(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Stretches of ``context`` bytes with holes, and what stood there."""

    def __init__(self, windows: text.Windows, masked: float) -> None:
        self._windows = windows
        self._masked = masked
        self.fingerprint = windows.fingerprint

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._windows[index]["tokens"][:-1]
        order = torch.rand(len(tokens))
        asked = order < self._masked
        asked[order.argmin()] = True
        how = torch.rand(len(tokens))
        shown = torch.where(how < 0.8, MASK, torch.randint(BYTES, tokens.shape))
        shown = torch.where(how < 0.9, shown, tokens)
        return {
            "tokens": torch.where(asked, shown, tokens),
            "targets": torch.where(asked, tokens, _NOT_ASKED),
        }


class Block(nn.Module):
    """Attention over the whole sample, then an MLP, each added to its input and normed."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, depth, causal=False)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, depth)
        self.mlp_norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out


class Decoder(nn.Module):
    """One more layer, its norm, and a score for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.weight = weight(VOCAB, width)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(functional.gelu(self.dense(x)))
        return functional.linear(x, self.weight, self.bias)
