"""A copy of layers' state in memory, made beside the training.

Between two steps of the optimizer nothing changes what a checkpoint holds. So the copy is made by
the thread that writes it, while the next step runs forward and backward, and only the next change
of the state waits for what is not copied yet. (CheckFreq, FAST'21, overlaps them likewise.) On a
GPU a stream of its own copies, into pinned memory.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from trainer.device import CPU, Device
from trainer.layerfile import LayerState


class Snapshot:
    """One copy at a time, in memory that is kept for the next."""

    def __init__(self, device: Device = CPU) -> None:
        self._device = device
        self._since = device.mark()
        self._places: dict[int, list[Tensor]] = {}
        self._is_taken = threading.Event()
        self._is_taken.set()

    def announce(self) -> None:
        """The state, as this thread has asked for it, must not change until it is taken."""
        self._since = self._device.mark()
        self._is_taken.clear()

    def take(self, states: Mapping[int, LayerState]) -> dict[int, LayerState]:
        """A copy of ``states`` that stays as it is until the next."""
        try:
            with self._device.aside(self._since):
                return {index: self._copied(index, state) for index, state in states.items()}
        finally:
            self._is_taken.set()

    def wait(self) -> float:
        """Return once the state may change; how many seconds that took."""
        if self._is_taken.is_set():
            return 0.0
        began = time.monotonic()
        self._is_taken.wait()
        return time.monotonic() - began

    def _copied(self, index: int, state: LayerState) -> LayerState:
        tensors = list(_tensors_of(state))
        places = self._places.get(index, [])  # a layer may have no tensor at all
        if not _are_alike(tensors, places):
            places = self._places[index] = self._device.places(tensors)
        pairs = zip(places, tensors, strict=True)
        copies = iter([place.copy_(tensor, non_blocking=True) for place, tensor in pairs])
        return LayerState(
            parameters={name: next(copies) for name in state.parameters},
            buffers={name: next(copies) for name in state.buffers},
            optimizer={
                name: {
                    key: next(copies) if isinstance(value, Tensor) else value
                    for key, value in moments.items()
                }
                for name, moments in state.optimizer.items()
            },
            aliases=state.aliases,
        )


def _tensors_of(state: LayerState) -> Iterator[Tensor]:
    yield from state.parameters.values()
    yield from state.buffers.values()
    for moments in state.optimizer.values():
        yield from (value for value in moments.values() if isinstance(value, Tensor))


def _are_alike(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> bool:
    return [(t.shape, t.dtype) for t in tensors] == [(p.shape, p.dtype) for p in places]
