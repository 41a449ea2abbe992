"""``ladder`` in a world that goes wrong as its arguments say. It reaches into the trainer it runs
in, as no program should.

vote_at, dies, after, misses    in the ``vote_at``-th vote rank ``dies`` is killed, ``after``
                                seconds into it or when it has the result; to the ranks in
                                ``misses`` the vote then looks cut off
disk                            a file: while it holds "slow" no fsync returns, while it holds
                                "full" each fails
gate                            a file: no sample is to be had before it is there
"""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import ladder
from ladder import inputs, layers, loss, lr_scale, optimizer  # noqa: F401

from trainer.groups import PeerLostError
from trainer.replicas import Replicas

FSYNC, VOTE = os.fsync, Replicas.vote


def dataset(args):
    if "vote_at" in args:
        Replicas.vote = cut_off(args)
    if "disk" in args:
        os.fsync = on(Path(args["disk"]))
    samples = ladder.dataset(args)
    return Gated(samples, Path(args["gate"])) if "gate" in args else samples


def cut_off(args):
    votes = 0

    def vote(replicas, totals, wishes):
        nonlocal votes
        votes += 1
        if votes != args["vote_at"]:
            return VOTE(replicas, totals, wishes)
        rank = replicas._spec.rank
        if rank == args["dies"] and "after" in args:
            threading.Thread(target=die, args=[args["after"]]).start()
        result = VOTE(replicas, totals, wishes)
        if rank == args["dies"] and "after" not in args:
            die()
        if rank in args.get("misses", []):
            raise PeerLostError((args["dies"],), "the vote was cut off")
        return result

    return vote


def die(after=0.0):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def on(disk):
    def fsync(descriptor):
        while state() == "slow":
            time.sleep(0.01)
        if state() == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FSYNC(descriptor)

    def state():
        return disk.read_text() if disk.exists() else ""

    return fsync


class Gated:
    def __init__(self, samples, gate):
        self.samples = samples
        self.gate = gate

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        while not self.gate.exists():
            time.sleep(0.01)
        return self.samples[index]
