"""Four layers of which one misbehaves as ``args["how"]`` says."""

import random
import time

import torch
from torch import nn

CALLS = LOSSES = 0
HOW = ""


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if HOW == "keeps statistics" else nn.Identity()

    def forward(self, x):
        global CALLS
        CALLS += 1
        if HOW == "raises" and CALLS > 12:
            raise ArithmeticError("enough")
        if HOW == "is slow":
            time.sleep(0.005)
        y = self.norm(self.linear(x))
        if HOW == "draws elsewhere":
            y = y * random.random()
        if HOW == "changes shape":
            y = torch.cat([y] * (1 + bool(x.sum() > 0)))
        return y


class First(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2) if HOW == "changes its input" else x)


class Last(nn.Linear):
    def forward(self, x):
        return super().forward(x) / (0.0 if HOW == "divides by zero" else 1.0)


def layers(args):
    global HOW
    HOW = args["how"]
    return [First(4, 4), Odd(), nn.Linear(4, 4), Last(4, 1)]


def dataset(args):
    numbers = torch.Generator().manual_seed(1)
    return [{"x": x} for x in torch.randn(40, 4, generator=numbers)]


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    global LOSSES
    LOSSES += 1
    is_late = HOW == "names a metric late" and LOSSES > 12
    return output.square().sum(), len(batch["x"]), {"late": 1.0} if is_late else {}
