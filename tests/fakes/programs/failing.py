"""Raises where ``args["where"]`` says: layers, dataset, sample, forward or loss."""

import torch
from torch import nn


class Angry(nn.Linear):
    def __init__(self, where):
        super().__init__(3, 3)
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            raise RuntimeError("no forward today")
        return super().forward(x)


class Samples:
    def __init__(self, where):
        self.where = where

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if self.where == "sample":
            raise OSError("no such picture")
        return {"x": torch.full((3,), float(index))}


where = "nowhere"


def layers(args):
    global where
    where = args["where"]
    if where == "layers":
        raise ValueError("no layers today")
    return [nn.Linear(3, 3), Angry(where), nn.Linear(3, 1)]


def dataset(args):
    if args["where"] == "dataset":
        raise FileNotFoundError("no data today")
    return Samples(args["where"])


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    if where == "loss":
        raise ZeroDivisionError("no loss today")
    return output.mean()
