"""Layers of which one makes something of one sample that is not finite, as ``args["how"]`` says.

input, layer, loss    the value itself
gradient              only the gradient of layer 1
reached               nothing does; the trainer's own sum of gradients is spoilt once, on rank
                      ``rank`` in its ``at``-th step, as by a machine that errs

The sample is ``args["sample"]``; a flag in the last column goes with it through all layers.
"""

import torch
from torch import nn

from trainer.replicas import Replicas

WIDTH = 4
SUM = Replicas.sum_gradients


class Layer(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x, flag = x[:, :WIDTH], x[:, WIDTH:]
        y = torch.tanh(self.linear(x))
        if self.how == "layer":
            y = torch.where(flag > 0, torch.inf, y)
        if self.how == "gradient":
            y = y + torch.sqrt(y.square() * (1 - flag))
        return torch.cat([y, flag], 1)


def layers(args):
    how = args["how"]
    return [
        Layer(""),
        Layer(how if how == "gradient" else ""),
        Layer(how if how == "layer" else ""),
        Layer(""),
    ]


def dataset(args):
    if args["how"] == "reached":
        Replicas.sum_gradients = spoil(args)
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(args.get("samples", 60), WIDTH, generator=numbers)
    flags = torch.zeros(len(x), 1)
    flags[args.get("sample", 0)] = 1.0
    if args["how"] == "input":
        x[args["sample"], 2] = torch.nan
    spoils = args["how"] == "loss"
    return [
        {"x": torch.cat([a, b]), "spoils": spoils * b[0]} for a, b in zip(x, flags, strict=True)
    ]


def eval_dataset(args):
    return dataset({"how": "nothing", "samples": args["held_out"]})


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    losses = output[:, :WIDTH].square().sum(1)
    losses = torch.where(batch["spoils"] > 0, torch.nan, losses)
    return losses.sum(), len(losses), {"largest": output[:, :WIDTH].abs().max()}


def optimizer(named_params, args):
    return torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9)


def spoil(args):
    steps = 0

    def sum_gradients(replicas):
        nonlocal steps
        steps += 1
        stage = replicas._stage
        if steps in args["at"] and replicas._spec.rank == args["rank"]:
            next(iter(stage.weights.values())).gradient.view(-1)[0] = torch.inf
        SUM(replicas)

    return sum_gradients
