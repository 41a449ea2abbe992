"""Sums by NCCL can be relied on only when they are settled, and a peer's death ends every wait.

NCCL itself is made believe: what it does on a GPU is for the tests that are marked so.
"""

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from trainer.device import CPU
from trainer.groups import Groups, NcclGroup, PeerLostError


class Work:
    """A call that is over when the test says so."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: Exception | None = None
        self.asked = threading.Event()

    def wait(self) -> None:
        """Makes the stream wait, and nobody else."""

    def is_completed(self) -> bool:
        self.asked.set()
        return self.is_over.is_set()

    def exception(self) -> Exception | None:
        return self.error


class Nccl:
    """The class of torch, as far as it is called."""

    Options = type("Options", (), {})

    def __init__(self, _: object, rank: int, size: int, options: Any) -> None:
        self.seat, self.timeout = (rank, size), options._timeout
        self.aborted = threading.Event()
        self.works: list[Work] = []
        self.is_quick = True

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self._called()

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._called()

    def abort(self) -> None:
        self.aborted.set()

    def _called(self) -> Work:
        self.works.append(Work())
        if self.is_quick:
            self.works[-1].is_over.set()
        return self.works[-1]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    """Of the ranks 1, 3 and 5; this one is 3. What is called from now on takes its time."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    store: Any = None
    made = NcclGroup([1, 3, 5], 3, store, timedelta(seconds=60), CPU)
    made._backend.is_quick = False
    return made


def newest(group: NcclGroup) -> Work:
    work: Work = group._backend.works[-1]
    return work


class Settling(threading.Thread):
    """Settles, beside the test."""

    def __init__(self, group: NcclGroup) -> None:
        super().__init__(daemon=True)
        self._group = group
        self.error: PeerLostError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._group.settle()
        except PeerLostError as error:
            self.error = error


def test_it_is_made_with_a_first_sum_and_torchs_watchdog_stands_by(group: NcclGroup) -> None:
    assert (group._backend.seat, group._backend.timeout) == ((1, 3), timedelta(seconds=60))
    assert len(group._backend.works) == 1
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    group.settle()


def test_it_is_settled_when_the_newest_call_is_over(group: NcclGroup) -> None:
    group.sum(torch.ones(2), torch.ones(3))
    group.share(torch.ones(2), 5)
    settling = Settling(group)
    assert newest(group).asked.wait(10) and settling.is_alive()
    newest(group).is_over.set()
    settling.join(10)
    assert not settling.is_alive() and settling.error is None


def test_what_nccl_shows_is_a_lost_peer(group: NcclGroup) -> None:
    group.sum(torch.ones(2))
    newest(group).error = RuntimeError("remote process exited\nand more")
    newest(group).is_over.set()
    with pytest.raises(PeerLostError, match=r"^NCCL: remote process exited$") as lost:
        group.settle()
    assert lost.value.ranks == (1, 5)


def test_an_abort_ends_the_wait_for_one_who_died(group: NcclGroup) -> None:
    group.sum(torch.ones(2))
    settling = Settling(group)
    assert newest(group).asked.wait(10)
    Groups(replicas=group).abort()
    settling.join(10)
    assert settling.error is not None and settling.error.ranks == (1, 5)
    assert group._backend.aborted.wait(10)


def test_nothing_is_relied_on_that_an_abort_brought_to_its_end(group: NcclGroup) -> None:
    group.sum(torch.ones(2))
    group.abort()
    newest(group).is_over.set()
    with pytest.raises(PeerLostError):
        Groups(ties={(0, 1): group}).settle()


def test_a_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    store: Any = None
    with pytest.raises(RuntimeError, match="built without NCCL"):
        NcclGroup([0, 1], 0, store, timedelta(seconds=60), CPU)
