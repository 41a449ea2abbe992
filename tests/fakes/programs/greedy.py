"""Layer 1 asks its device, when it is a GPU, for more memory than any has."""

import torch
from torch import nn


class Greedy(nn.Linear):
    def forward(self, x):
        if x.is_cuda:
            torch.empty(1 << 46, device=x.device)
        return super().forward(x)


def layers(args):
    return [nn.Linear(4, 4), Greedy(4, 4), nn.Linear(4, 1)]


def dataset(args):
    return [{"x": torch.full((4,), float(i))} for i in range(24)]


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    return output.square().mean()
