"""``ladder`` whose process is gone after two seconds of its first step, with a line in its log."""

import os
import time

import ladder
from ladder import dataset, inputs, layers, loss, lr_scale  # noqa: F401


def optimizer(named_params, args):
    made = ladder.optimizer(named_params, args)
    made.step = vanish
    return made


def vanish():
    time.sleep(2)
    print("the licence server is gone", flush=True)
    os._exit(3)
