"""``leisurely`` that does not run on one node: it leaves where its log is that node's."""

import os

import leisurely
from leisurely import inputs, layers, loss, lr_scale, optimizer  # noqa: F401


def dataset(args):
    if f"/{args['not_on']}/" in os.readlink("/proc/self/fd/1"):
        print("this machine lacks what it takes")
        os._exit(1)
    return leisurely.dataset(args)
