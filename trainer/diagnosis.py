"""Where a number that is not finite came from.

In a step's vote all that is left of it is a sum that is not finite. A step can be computed again,
so that is done, with a witness at each stage: it looks at all that comes in and goes out, and is at
fault when it made something out of finite numbers that is not finite.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.contract.topology import MicroBatch
from trainer.links import tensors_in
from trainer.stages import Stage


class Witness:
    """Watches one stage while it computes a step."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._micro_batch: MicroBatch | None = None
        self._is_blind = False
        """Something not finite came from another stage: what follows says nothing."""
        self.found: str | None = None
        """What this stage made first, in words that fit into a sentence."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each layer's output is looked at."""
        hooks = [
            layer.register_forward_hook(self._hook(index))
            for index, layer in self._stage.layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for owner, weight in reversed(self._stage.weights.items()):  # as the backward pass went
            self._made(f"the gradient of {owner}", weight.gradient)

    def at(self, micro_batch: MicroBatch) -> None:
        """What follows belongs to ``micro_batch``."""
        self._micro_batch = micro_batch

    def received(self, message: Any) -> None:
        """Another stage gave this."""
        self._is_blind = self._is_blind or not _is_finite(message)

    def made(self, what: str, value: Any) -> None:
        """This stage did, for the micro-batch at hand."""
        number = self._micro_batch.number if self._micro_batch else 0
        self._made(f"{what} of micro-batch {number}", value)

    def _made(self, what: str, value: Any) -> None:
        if not self._is_blind and self.found is None and not _is_finite(value):
            self.found = what

    def _hook(self, index: int) -> Any:
        def look(_module: nn.Module, _given: Any, output: Any) -> None:
            self.made(f"layer {index}'s output", output)

        return look


def _is_finite(value: Mapping[str, Any] | Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value))
