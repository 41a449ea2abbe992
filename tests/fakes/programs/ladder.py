"""Embedding, residual rungs, head: a small model whose every number is fixed by its arguments."""

import torch
from torch import nn

VOCABULARY, LENGTH = 13, 5


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens):
        return self.tokens(tokens)


class Rung(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, width) / width)

    def forward(self, x):
        return nn.functional.linear(self.norm(x), self.weight)


def layers(args):
    width = args.get("width", 16)
    embed, head = Embed(width), Head(width)
    if args.get("tied"):
        head.weight = embed.tokens.weight
    rungs = [Rung(width, args.get("dropout", 0.0)) for _ in range(4)]
    if args.get("shared"):
        for rung in rungs:
            rung.up = rungs[0].up
    if args.get("pause"):
        rungs[1] = nn.Tanh()
    embed.requires_grad_(not args.get("frozen"))
    return [embed, *rungs, head]


def dataset(args):
    numbers = torch.Generator().manual_seed(7)
    shape = (args.get("samples", 24), LENGTH + 1)
    return [{"tokens": row} for row in torch.randint(VOCABULARY, shape, generator=numbers)]


def eval_dataset(args):
    numbers = torch.Generator().manual_seed(8)
    shape = (args.get("held_out", 10), args.get("held_out_length", LENGTH) + 1)
    return [{"tokens": row} for row in torch.randint(VOCABULARY, shape, generator=numbers)]


def inputs(batch):
    return batch["tokens"][:, :-1]


def loss(output, batch):
    targets = batch["tokens"][:, 1:]
    losses = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    right = (output.argmax(-1) == targets).float().mean()
    return losses, targets.numel(), {"accuracy": right}


def optimizer(named_params, args):
    decayed = [p for name, p in named_params if "norm" not in name]
    others = [p for name, p in named_params if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.get("lr", 3e-3))


def lr_scale(step, args):
    return min(1.0, step / 5)
