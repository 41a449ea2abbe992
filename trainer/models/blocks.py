"""What the builtin transformers are built of."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.dropout import Dropout

STD = 0.02
"""Of the first weights."""


class Attention(nn.Module):
    """Each place looks at all places of its sample; ``causal``: at itself and those before."""

    def __init__(self, width: int, heads: int, depth: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.heads = heads
        self.causal = causal
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, std=STD / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        per_head = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = per_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return out


class Mlp(nn.Module):
    """Each place by itself: wider by four, GELU, back."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, std=STD / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Embedding(nn.Module):
    """Tokens (samples, length) -> (samples, length, width), with learned positions."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = weight(vocab, width)
        self.positions = weight(context, width)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        placed = functional.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]
        out: Tensor = self.dropout(placed)
        return out


def weight(rows: int, columns: int) -> nn.Parameter:
    """A matrix of small random numbers."""
    return nn.Parameter(nn.init.normal_(torch.empty(rows, columns), std=STD))


def linear(inputs: int, outputs: int, std: float = STD) -> nn.Linear:
    """Without biases: a key's has no effect, so its gradient is noise that Adam would amplify."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=std)
    return made
