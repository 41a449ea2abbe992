"""The random generators that a user's code may draw from: Python's, numpy's and torch's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from trainer.contract.samples import mix32


def seed_all(seed: int, position: int = 0) -> None:
    """Seed the three generators by a mix of ``seed`` and ``position``."""
    mixed = mix32(mix32(seed) << 32 ^ position)
    random.seed(mixed)
    numpy.random.seed(mixed)
    torch.default_generator.manual_seed(mixed)


@contextmanager
def restored() -> Iterator[None]:
    """Whatever is drawn or seeded inside, outside nothing has happened to the three generators."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
