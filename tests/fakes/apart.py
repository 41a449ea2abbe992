"""A trainer on a device that is made believe to lie apart from the host, as a GPU does.

What is placed is a copy, and the host's memory is filled with other numbers at once, as a pinned
buffer that is lent again would be. Nobody can compute with what came in before it is placed, nor
send what was not fetched, nor read times before a synchronisation. Run in a zygote's fork.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from trainer import main
from trainer.contract.spec import RunSpec
from trainer.device import Device, Mark, moved
from trainer.groups import Group, Sending


class OnHost(Tensor):
    """Can be looked at from outside and copied, nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("numel", "__get__"):
            raise AssertionError(f"{func.__name__}() of what lies on the host")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Apart(Device):
    """Computes where the CPU does."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)
        self._done = 0

    def place(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(Tensor)
        placed = tensor.clone()
        with torch.no_grad():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        return placed

    def feed(self, tensor: Tensor) -> Tensor:
        return self.place(tensor)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return super().room(shape, dtype).as_subclass(OnHost)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.clone().as_subclass(OnHost) for tensor in tensors]

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]

    def hosting(self, layer: nn.Module) -> AbstractContextManager[None]:
        return moved(layer, torch.clone)

    def mark(self) -> Mark:
        return next(self._numbers)

    def seconds(self, began: Mark, ended: Mark) -> float:
        assert began < ended <= self._done, "nobody has waited for it"
        return 1e-3

    def synchronize(self) -> None:
        self._done = next(self._numbers)

    @contextmanager
    def aside(self, since: Mark) -> Iterator[None]:
        assert since
        yield


def run(spec: RunSpec, connection: socket.socket) -> int:
    """As :func:`trainer.main.run`."""
    send = Group.send  # tag 0: a header, which never was on a device

    def send_fetched(group: Group, tensor: Tensor, to: int, tag: int) -> Sending:
        assert type(tensor) is OnHost or tag == 0, "sends what was not fetched"
        return send(group, tensor, to, tag)

    with patch.object(Device, "of", lambda _: Apart()), patch.object(Group, "send", send_fetched):
        return main.run(spec, connection)
