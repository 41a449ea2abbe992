"""``layers`` equal layers of ``width`` squared parameters: 8 of 2560 are 210 MB."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def layers(args):
    return [Layer(args["width"]) for _ in range(args["layers"])]


def dataset(args):
    return [{"x": torch.full((args["width"],), i / 10)} for i in range(8)]


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    return output.square().mean()
