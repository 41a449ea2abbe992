"""Dropout whose mask nobody has to remember: a pure function of the job's seed, the step, the
layer, the sample's place in the global batch, and the element's place in the sample.

So it is the same at every depth, number of replicas and micro-batch size, a recompute draws it
again, and no generator's state is saved. The stage says where it is (:func:`enter`) before it runs
a layer; where nobody does, as in a plain script, this is ordinary dropout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.contract.samples import mix32


@dataclass
class Place:
    """Where in the training a layer runs."""

    seed: int
    step: int
    layer: int
    first: int
    """The place in the global batch of the micro-batch's first sample."""
    drawn: int = 0
    """Masks that this run of the layer has drawn."""


_here: list[Place] = []


def enter(place: Place) -> None:
    """From now on masks are those of ``place``, the first, the second … of its layer."""
    _here[:] = [place]


def leave() -> None:
    """Back to ordinary dropout."""
    _here.clear()


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` while training and scales up the others.

    The first dimension of its input is that of the samples.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout {p} is not from 0 to below 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if not _here:
            return functional.dropout(x, self.p)
        return x.masked_fill(dropped(_here[0], x.shape, self.p, x.device), 0.0) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropped(
    place: Place, shape: torch.Size, p: float, device: torch.device | None = None
) -> Tensor:
    """The next mask of ``place``: true where an element is dropped. The same on every device."""
    key = 0
    for number in (place.seed, place.step, place.layer, place.drawn):
        key = mix32(key << 32 ^ number)
    place.drawn += 1
    samples = [_signed(mix32(key << 32 ^ (place.first + i))) for i in range(shape[0])]
    elements = torch.arange(shape[1:].numel(), dtype=torch.int32, device=device)
    keys = torch.tensor(samples, dtype=torch.int32)
    if elements.is_cuda:  # pinned: else the copy would wait for all that the GPU is at
        keys = keys.pin_memory().to(elements.device, non_blocking=True)
    hashes = keys[:, None] ^ elements[None]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # murmur3's finalizer
        hashes ^= (hashes >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if factor != 1:
            hashes *= _signed(factor)
    return (hashes < round(p * 2**32) - 2**31).view(shape)


def _signed(bits: int) -> int:
    """The 32-bit integer with these bits."""
    return bits - 2**32 if bits >= 2**31 else bits
