"""A regression with a small MLP: six layers, made-up data, a mean loss."""

import torch
from torch import nn


class Made(torch.utils.data.Dataset):
    def __init__(self, samples, width):
        self.x = torch.randn(samples, width)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


def layers(args):
    width = args.get("width", 8)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    return [nn.Linear(width, width), *hidden, nn.Linear(width, 1)]


def dataset(args):
    return Made(args.get("samples", 100), args.get("width", 8))


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["y"])
