"""Four layers of which the second (number 1) misbehaves as ``args["how"]`` says."""

import random
import time

import torch
from torch import nn

CALLS = 0


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if how == "keeps statistics" else nn.Identity()

    def forward(self, x):
        global CALLS
        CALLS += 1
        if self.how == "raises" and CALLS > 12:
            raise ArithmeticError("enough")
        if self.how == "is slow":
            time.sleep(0.005)
        if self.how == "changes its input":
            x.mul_(2)
        y = self.norm(self.linear(x))
        if self.how == "draws elsewhere":
            y = y * random.random()
        if self.how == "changes shape":
            y = torch.cat([y] * (1 + (CALLS > 4)))
        return y


class Quiet(nn.Linear):
    def forward(self, x):
        return super().forward(x) / (0.0 if "divides by zero" in self.how else 1.0)


def layers(args):
    first, last = nn.Linear(4, 4), Quiet(4, 1)
    last.how = args["how"]
    return [first, Odd(args["how"]), nn.Linear(4, 4), last]


def dataset(args):
    numbers = torch.Generator().manual_seed(1)
    return [{"x": x} for x in torch.randn(40, 4, generator=numbers)]


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    metrics = {"late": 1.0} if CALLS > 12 and len(batch["x"]) == 3 else {}
    return output.square().sum(), len(batch["x"]), metrics
