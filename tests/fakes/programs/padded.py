"""Sequences of many lengths, padded; what the layers hand on differs in kind and shape at each cut,
and one keeps a constant buffer that no state dict has.
"""

import torch
from torch import nn

VOCABULARY, LONGEST, PAD = 11, 6, 0


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)

    def forward(self, tokens):
        return self.tokens(tokens), tokens != PAD


class Widen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, given):
        x, mask = given
        return torch.tanh(self.linear(x)), mask, mask.sum(1)


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        places = torch.arange(LONGEST * 12).view(LONGEST, 12) / 100
        self.register_buffer("places", places.sin(), persistent=False)

    def forward(self, given):
        x, mask, lengths = given
        x = (x + self.places) * mask[..., None]
        mean = x.sum(1, keepdim=True) / lengths[:, None, None]
        return x + torch.tanh(self.linear(mean))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x):
        return self.linear(x).transpose(1, 2).contiguous()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, VOCABULARY)

    def forward(self, x):
        return self.linear(x.transpose(1, 2))


def layers(args):
    return [Embed(), Widen(), Mix(), Narrow(), Head()]


def dataset(args):
    numbers = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, VOCABULARY, (args["samples"], LONGEST), generator=numbers)
    lengths = torch.randint(1, LONGEST + 1, (args["samples"], 1), generator=numbers)
    tokens = tokens.masked_fill(torch.arange(LONGEST) >= lengths, PAD)
    return [{"tokens": row, "targets": row.roll(-1)} for row in tokens]


def inputs(batch):
    return batch["tokens"]


def loss(output, batch):
    counts = batch["tokens"] != PAD
    losses = nn.functional.cross_entropy(
        output.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    )
    return (losses * counts.flatten()).sum(), counts.sum()


def optimizer(named_params, args):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9)


def lr_scale(step, args):
    return 1 / step
