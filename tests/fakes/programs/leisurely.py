"""``ladder`` that rests before each micro-batch: many of it can run on a busy machine for long."""

import time

import ladder
from ladder import dataset, layers, loss, lr_scale, optimizer  # noqa: F401

REST_SECONDS = 0.05


def inputs(batch):
    time.sleep(REST_SECONDS)
    return ladder.inputs(batch)
