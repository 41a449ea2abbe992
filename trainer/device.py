"""Where a trainer computes: the one room that knows ``cpu`` from ``cuda:N``.

Everybody else reads the same for both. On the CPU nothing here copies, waits or allocates more than
plain code would: a tensor that is placed is the tensor itself. On a GPU what goes out and in passes
through pinned host memory, which torch's own allocator lends again once the stream is done with it.

    batch --feed--> GPU      message --fetch--> pinned --gloo--> … --gloo--> pinned --place--> GPU

Nothing touches CUDA before :meth:`Device.of`: the zygote must not, a trainer is a fork of it.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trainer.program import ProgramError

Mark: TypeAlias = Any
"""A moment in a device's work: seconds, or an event of the GPU's stream."""


class Device:
    """The CPU, and what any device can do."""

    kind = "cpu"
    tolerance = 0.0
    """By what part of the largest number two runs of the same layers may differ."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self.torch = torch.device(name)

    @staticmethod
    def of(name: str) -> "Device":
        """That device, current for the thread that calls. Raises ProgramError when it is not here,
        or this torch cannot use it.
        """
        if name == "cpu":
            return Device()
        if not (found := re.fullmatch(r"cuda:(\d+)", name)):
            raise ProgramError(f"device {name} is none: take cpu or cuda:N")
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise ProgramError(
                f"device {name} cannot be used: this torch, {torch.__version__}, is built without "
                "CUDA; install one with it on every VM, or take cpu"
            )
        if int(found[1]) >= (count := torch.cuda.device_count()):
            raise ProgramError(f"device {name} is not here: torch sees {count} CUDA devices")
        return Gpu(name)

    @property
    def title(self) -> str:
        """What it is called by who made it; empty when that says nothing."""
        return ""

    def enter(self) -> None:
        """To be called by each further thread that allocates or copies."""

    # --- memory -------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Tensor:
        """It, on the device, for what this thread computes from now on."""
        return tensor

    def feed(self, tensor: Tensor) -> Tensor:
        """The same for what is small and new; nobody waits for the copy."""
        return tensor

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a message that comes in."""
        return torch.empty(tuple(shape), dtype=dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """They, on the host, whole when this returns."""
        return list(tensors)

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for copies of ``tensors`` that is kept for long."""
        return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def hosting(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Inside, the tensors of a layer from the host lie on the device."""
        return nullcontext()

    # --- work ---------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Of what layers draw."""
        torch.default_generator.manual_seed(seed)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Inside, operations that may compute in ``dtype``."""
        return torch.autocast(self.kind, dtype=dtype)

    def mark(self) -> Mark:
        """The end of all that this thread has asked for."""
        return time.perf_counter()

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Between two marks that are reached."""
        return float(ended - began)

    def is_reached(self, mark: Mark) -> bool:
        """Whether the device is that far."""
        return True

    def synchronize(self) -> None:
        """Wait until all that this thread has asked for is done."""

    def aside(self, since: Mark) -> AbstractContextManager[None]:
        """Inside, copies see the state at ``since`` without waiting for what was asked for after
        it; at the end they are done.
        """
        return nullcontext()


class Gpu(Device):
    """One CUDA device; its main thread works on the default stream."""

    kind = "cuda"
    tolerance = 1e-2

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.enter()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[self.torch.index]
        self._side = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def enter(self) -> None:
        torch.cuda.set_device(self.torch)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch, non_blocking=True)

    def feed(self, tensor: Tensor) -> Tensor:
        return self.place(tensor if tensor.is_cuda else tensor.pin_memory())

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        fetched = [
            self.room(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self.mark().synchronize()
        return fetched

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.room(tensor.shape, tensor.dtype) for tensor in tensors]

    def hosting(self, layer: nn.Module) -> AbstractContextManager[None]:
        return moved(layer, self.place)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._generator.manual_seed(seed)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def seconds(self, began: Mark, ended: Mark) -> float:
        return float(began.elapsed_time(ended)) / 1e3

    def is_reached(self, mark: Mark) -> bool:
        return bool(mark.query())

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch).synchronize()

    @contextmanager
    def aside(self, since: Mark) -> Iterator[None]:
        with torch.cuda.device(self.torch), torch.cuda.stream(self._side):
            self._side.wait_event(since)
            try:
                yield
            finally:
                self._side.synchronize()


CPU = Device()


@contextmanager
def moved(layer: nn.Module, place: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, its parameters and buffers are what ``place`` makes of them, without gradients;
    afterwards they and their gradients are the very ones from before.
    """
    tensors = [*layer.parameters(), *layer.buffers()]
    homes = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    try:
        for tensor, home, _ in homes:
            tensor.grad = None
            tensor.data = place(home)
        yield
    finally:
        for tensor, home, gradient in homes:
            tensor.grad = None
            tensor.data = home
            tensor.grad = gradient


def is_the_programs(error: Exception) -> bool:
    """Whether a failure of the device outside the program's calls is still its own: too little
    memory, or an index out of range that a kernel met after the call had returned.
    """
    return isinstance(error, torch.OutOfMemoryError) or "device-side assert" in str(error)
