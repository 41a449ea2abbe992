"""Trains well until its ``args["at"]``-th use of ``args["where"]``, and then raises what
``args["what"]`` says.
"""

import torch
from torch import nn

ARGS = {}
USES = 0


def use(where):
    global USES
    if where != ARGS["where"]:
        return
    USES += 1
    if ARGS["at"] > USES:
        return
    what = ARGS["what"]
    if what == "allocator":
        torch.empty(2**50)
    if what == "device":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if what == "memory":
        raise MemoryError
    raise ValueError("enough of this")


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        use("backward")
        return gradient * 2


class Layer(nn.Linear):
    def forward(self, x):
        use("layer")
        return torch.tanh(Step.apply(super().forward(x)))


class Samples:
    def __init__(self):
        self.x = torch.randn(40, 4)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        use("sample")
        return {"x": self.x[index]}


class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        use("step")
        return super().step(closure)


def layers(args):
    ARGS.update(args)
    return [nn.Linear(4, 4), nn.Tanh(), Layer(4, 4), nn.Linear(4, 1)]


def dataset(args):
    return Samples()


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    use("loss")
    return output.square().mean()


def optimizer(named_params, args):
    return Sgd([p for _, p in named_params], lr=0.1)
