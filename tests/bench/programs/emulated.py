"""Layers that take time instead of computing: they wait without using the core.

A message is a row of float64: [when it may be used, its micro-batch, payload…]. A forward takes
``forward`` seconds, a backward twice that, each times a random factor with mean 1 and coefficient
of variation ``cv``, drawn from (seed, turn, layer, kind, micro-batch): every way of running the
same turn meets the same delays. A program as a user writes it; the bench sets ``turn``.
"""

import math
import random
import time

import torch
from torch import Tensor, nn

WIDTH = 16


def factor(cv, *key):
    """Log-normal, mean 1."""
    if not cv:
        return 1.0
    spread = math.sqrt(math.log1p(cv * cv))
    return random.Random(repr(key)).lognormvariate(-spread * spread / 2, spread)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        layer.take(1.0, "F", int(x[0, 1]))
        return x + 0 * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.layer.take(2.0, "B", int(x[0, 1]))
        onward = gradient.clone()
        onward[0, 1] = x[0, 1]
        return onward, torch.zeros(1, dtype=torch.float64), None


class Waiting(nn.Module):
    """One layer."""

    def __init__(self, index, args):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.index = index
        self.args = args
        self.turn = 0
        self.forwarded = set()
        self.backwarded = set()
        self.most_in_flight = 0

    def start(self, turn):
        """A new mini-batch."""
        self.turn, self.forwarded, self.backwarded, self.most_in_flight = turn, set(), set(), 0

    def take(self, part, kind, micro_batch):
        """Wait as long as this task takes; count what is in flight."""
        if kind == "F":
            kind = "R" if micro_batch in self.forwarded else "F"
            self.forwarded.add(micro_batch)
            in_flight = len(self.forwarded) - len(self.backwarded)
            self.most_in_flight = max(self.most_in_flight, in_flight)
        key = (self.args["seed"], self.turn, self.index, kind, micro_batch)
        time.sleep(part * self.args["forward"] * factor(self.args["cv"], *key))
        if kind == "B":
            self.backwarded.add(micro_batch)

    def forward(self, x):
        return _Wait.apply(x, self.weight, self)


class Computing(nn.Module):
    """A layer that computes: ``rows`` x ``width`` through two matrices."""

    def __init__(self, index, args):
        super().__init__()
        self.rows, width = args["rows"], args["width"]
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ).double()

    def start(self, turn):
        """Nothing changes from turn to turn."""

    most_in_flight = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.view(self.rows, -1)).view_as(x)


def layers(args):
    kind = Computing if args.get("rows") else Waiting
    return [kind(index, args) for index in range(args["layers"])]


def dataset(args):
    width = args["rows"] * args["width"] if args.get("rows") else WIDTH
    return [{"x": torch.zeros(width, dtype=torch.float64)}]


def loss(output, batch):
    return output.sum(), float(len(output))


def optimizer(named_params, args):
    return torch.optim.SGD([p for _, p in named_params], lr=0.0)


def inputs(batch):
    return batch["x"]
