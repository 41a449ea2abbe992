"""``leisurely`` that is slow at what the file ``args["slow"]`` says while it does: "samples 1" is a
second for each; "held out" likewise, and "disk" for each file that is made durable. Its samples
come from two processes of its own.
"""

import multiprocessing
import os
import time
from pathlib import Path

import ladder
from leisurely import inputs, layers, loss, lr_scale, optimizer  # noqa: F401

FSYNC = os.fsync


class Slow:
    def __init__(self, samples, what, slow):
        self.samples = samples
        self.what = what
        self.slow = slow

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        rest_for(self.what, self.slow)
        return self.samples[index]


class Fetched(Slow):
    """By others, who are forked when the first is asked for."""

    pool = None

    def __getitem__(self, index):
        if self.pool is None:
            self.pool = multiprocessing.get_context("fork").Pool(2, be_asked_by, (self,))
        return self.pool.apply(answer, (index,))


def be_asked_by(samples):
    global asked
    asked = samples


def answer(index):
    return Slow.__getitem__(asked, index)


def dataset(args):
    slow = Path(args["slow"])

    def fsync(descriptor):
        rest_for("disk", slow)
        FSYNC(descriptor)

    os.fsync = fsync
    return Fetched(ladder.dataset(args), "samples", slow)


def eval_dataset(args):
    return Slow(ladder.eval_dataset({"held_out": 1000}), "held out", Path(args["slow"]))


def rest_for(what, slow):
    said, _, seconds = slow.read_text().rpartition(" ") if slow.exists() else ("", "", "")
    if said == what:
        time.sleep(float(seconds))
