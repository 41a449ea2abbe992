"""Layers that hand on a tuple: the activations and a mask that no gradient flows through."""

import torch
from torch import nn


class First(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"]), batch["x"] > 0


class Middle(nn.Linear):
    def forward(self, pair):
        x, mask = pair
        return torch.tanh(super().forward(x)) * mask, mask


class Last(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0])


def layers(args):
    return [First(4, 4), Middle(4, 4), Middle(4, 4), Last(4, 2)]


def dataset(args):
    return [{"x": torch.randn(4), "label": i % 2} for i in range(50)]


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["label"])


def optimizer(named_params, args):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9)
