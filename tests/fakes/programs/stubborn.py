"""A small model with a family that will not go: a child that ignores SIGTERM, one in a session of
its own, and a daemon that forked twice. Each sleeps under the name that ``args["name"]`` gives.
"""

import ctypes
import os
import signal
import time

import torch
from torch import nn

_PR_SET_NAME = 15


def layers(args):
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]


def dataset(args):
    for how in (stay, leave, fork_twice):
        if os.fork() == 0:
            how(args["name"])
    return [{"x": torch.full((4,), i / 40)} for i in range(40)]


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    return output.square().mean()


def leave(name):
    os.setsid()
    stay(name)


def fork_twice(name):
    os.setsid()
    if os.fork() == 0:
        stay(name)
    os._exit(0)


def stay(name):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    while True:
        time.sleep(3600)
