"""A small decoder that predicts the next byte of a text: ``builtin:gpt``.

A program like a user's: embedding, ``layers`` blocks (pre-norm, causal attention, MLP), final norm
and head. The head shares the embedding's weight unless ``tied`` is false. No layer keeps a buffer.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from trainer.contract.builtins import GPT
from trainer.dropout import Dropout
from trainer.models import text
from trainer.models.blocks import Attention, Embedding, Mlp, weight


def layers(args: dict[str, Any]) -> list[nn.Module]:
    """The embedding, the blocks, and the head."""
    config = settings(args)
    vocab, width, dropout = config["vocab"], config["width"], config["dropout"]
    embedding = Embedding(vocab, config["context"], width, dropout)
    blocks = [
        Block(width, config["heads"], config["layers"], dropout) for _ in range(config["layers"])
    ]
    head = Head(vocab, width)
    if config["tied"]:
        head.weight = embedding.tokens
    return [embedding, *blocks, head]


def dataset(args: dict[str, Any]) -> text.Windows:
    """All of the text but its end."""
    config = settings(args)
    return text.to_train_on(text.read_bytes(config["text"]), config)


def eval_dataset(args: dict[str, Any]) -> text.Windows:
    """Of the end of the text, ``held_out`` samples."""
    config = settings(args)
    return text.to_evaluate_on(text.read_bytes(config["text"]), config)


def inputs(batch: dict[str, Tensor]) -> Tensor:
    """All tokens but the last, which is only to be predicted."""
    return text.all_but_the_last(batch)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy in nats, summed over all predicted bytes."""
    return text.next_token_loss(output, batch)


def lr_scale(step: int, args: dict[str, Any]) -> float:
    """A linear warm-up, then a cosine down to a tenth when ``decay`` is given."""
    return text.lr_scale(step, settings(args))


def settings(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their defaults; one of another name is an error."""
    return text.settings(args, GPT)


class Block(nn.Module):
    """Attention, then an MLP, each on the normed input and added to it."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, depth, causal=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, depth)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Head(nn.Module):
    """The final norm, and a score for each token."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = weight(vocab, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)
