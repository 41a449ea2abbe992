"""Layers that take time instead of computing: they wait without using the core.

A message is a row of float64: [when it may be used, its micro-batch, payload…]. A forward takes
``forward`` seconds, a backward twice that, each times a random factor with mean 1 and coefficient
of variation ``cv``, drawn from (seed, turn, layer, kind, micro-batch): every way of running the
same turn meets the same delays. A program as a user writes it; the bench sets ``turn``.
"""

import math
import random
import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


def factor(cv: float, *key: object) -> float:
    """Log-normal, mean 1."""
    if not cv:
        return 1.0
    spread = math.sqrt(math.log1p(cv * cv))
    return random.Random(repr(key)).lognormvariate(-spread * spread / 2, spread)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "Waiting") -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        layer.take(1.0, "F", int(x[0, 1]))
        return x + 0 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.layer.take(2.0, "B", int(x[0, 1]))
        onward = gradients[0].clone()
        onward[0, 1] = x[0, 1]
        return onward, torch.zeros(1, dtype=torch.float64), None


class Waiting(nn.Module):
    """One layer."""

    def __init__(self, index: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.index = index
        self.args = args
        self.start(0)

    def start(self, turn: int) -> None:
        """A new mini-batch."""
        self.turn = turn
        self.forwarded: set[int] = set()
        self.backwarded: set[int] = set()
        self.most_in_flight = 0

    def take(self, part: float, kind: str, micro_batch: int) -> None:
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

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return waited


class Computing(nn.Module):
    """A layer that computes: ``rows`` x ``width`` through two matrices."""

    def __init__(self, index: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.rows, width = args["rows"], args["width"]
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ).double()

    def start(self, turn: int) -> None:
        """Nothing changes from turn to turn."""

    most_in_flight = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.view(self.rows, -1))
        return x + y.view_as(x)


def layers(args: dict[str, Any]) -> list[nn.Module]:
    kind: Any = Computing if args.get("rows") else Waiting
    return [kind(index, args) for index in range(args["layers"])]


def dataset(args: dict[str, Any]) -> list[dict[str, Tensor]]:
    width = args["rows"] * args["width"] if args.get("rows") else WIDTH
    return [{"x": torch.zeros(width, dtype=torch.float64)}]


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return output.sum(), float(len(output))


def optimizer(named_params: Any, args: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_params], lr=0.0)


def inputs(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"]
