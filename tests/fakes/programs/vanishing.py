"""``ladder`` whose process is gone two seconds into its optimizer's first step; its log says so."""

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
