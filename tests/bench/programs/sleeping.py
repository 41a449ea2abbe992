"""Layers that sleep instead of computing, each its own time, so that many of them run side by side
on few cores; messages and weights are real. A program as a user writes it.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS = 16, 8


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None


class Sleeping(nn.Module):
    """``seconds`` a sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, self.seconds * len(x))  # type: ignore[no-untyped-call]
        return torch.tanh(self.mix(slept))


def layers(args: dict[str, Any]) -> list[nn.Module]:
    return [Sleeping(seconds) for seconds in args["seconds"]]


def dataset(args: dict[str, Any]) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(ROWS, WIDTH, generator=made)} for _ in range(256)]


def inputs(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"]


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.square().mean()
