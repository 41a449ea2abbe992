"""A copy of layers' state in memory that was touched before: what a save costs a step is one copy.

Fresh memory costs several times the copy itself, in page faults; so the room is made, and written
to, long before it is needed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.layerfile import LayerState

Path = tuple[str, ...]
"""Which tensor: its kind, its name, and the optimizer's key."""


class Snapshot:
    """Room for one copy; each :meth:`take` replaces the one before."""

    def __init__(self) -> None:
        self._room: dict[Path, Tensor] = {}

    def touch(self, states: Mapping[int, LayerState]) -> None:
        """Make room for such states. Reads no values."""
        for state in states.values():
            for kind, tensors in (("parameter", state.parameters), ("buffer", state.buffers)):
                for name, tensor in tensors.items():
                    self._place((kind, name), tensor).zero_()
            for name, moments in state.optimizer.items():
                for key, value in moments.items():
                    if isinstance(value, Tensor):
                        self._place(("moment", name, key), value).zero_()

    def take(self, states: Mapping[int, LayerState]) -> dict[int, LayerState]:
        """A copy of ``states`` that stays as it is until the next."""
        return {
            index: LayerState(
                parameters={n: self._copy(("parameter", n), t) for n, t in s.parameters.items()},
                buffers={n: self._copy(("buffer", n), t) for n, t in s.buffers.items()},
                optimizer={
                    name: {
                        key: self._copy(("moment", name, key), v) if isinstance(v, Tensor) else v
                        for key, v in moments.items()
                    }
                    for name, moments in s.optimizer.items()
                },
                aliases=s.aliases,
            )
            for index, s in states.items()
        }

    def _copy(self, path: Path, tensor: Tensor) -> Tensor:
        return self._place(path, tensor).copy_(tensor)

    def _place(self, path: Path, like: Tensor) -> Tensor:
        place = self._room.get(path)
        if place is None or (place.shape, place.dtype) != (like.shape, like.dtype):
            place = torch.empty(like.shape, dtype=like.dtype)
            self._room[path] = place
        return place
