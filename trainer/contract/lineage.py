"""Which of a job's checkpoints count: the rules of lineage. PURE.

Each generation resumed from a step of an older one; the chain of these links, from the newest
generation back to the first weights, is the job's history. What lies beside it is void.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from trainer.contract.spec import ResumedFrom


class Placed(Protocol):
    """Anything that stands at a step of a generation."""

    @property
    def step(self) -> int: ...
    @property
    def generation(self) -> int: ...


_P = TypeVar("_P", bound=Placed)


def lineage(
    links: Mapping[int, ResumedFrom | None], newest_generation: int | None = None
) -> dict[int, int | None]:
    """The chain of ``resumed_from`` that ends in the newest generation: generation -> the highest
    step of it that counts (None: all of them).

    ``links`` says what each generation resumed from. Leave out a generation that committed no step
    (and did not write the first weights): it is no link, and cannot void what another did. Of each
    generation only steps up to what its child resumed from count.
    """
    chain: dict[int, int | None] = {}
    known = [g for g in links if newest_generation is None or g <= newest_generation]
    generation, bound = max(known, default=None), None
    while generation is not None:
        chain[generation] = bound
        link = links.get(generation)
        if link is None or link.generation >= generation:
            break
        generation, bound = link.generation, link.step
    return chain


def counts(placed: Placed, chain: Mapping[int, int | None]) -> bool:
    """Whether ``placed`` lies in the lineage ``chain``."""
    if placed.generation not in chain:
        return False
    bound = chain[placed.generation]
    return bound is None or placed.step <= bound


def newest_complete(candidates: Iterable[_P], chain: Mapping[int, int | None]) -> _P | None:
    """The newest of ``candidates`` (complete ones that nobody condemned) in the lineage."""
    inside = (c for c in candidates if counts(c, chain))
    return max(inside, key=lambda c: (c.step, c.generation), default=None)
