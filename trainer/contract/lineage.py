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


class Ran(Protocol):
    """A generation that is known."""

    @property
    def number(self) -> int: ...
    @property
    def resumed_from(self) -> ResumedFrom | None: ...
    @property
    def committed(self) -> int: ...


class Saved(Placed, Protocol):
    """A checkpoint that is known, whole or not; its parts say what their writer resumed from."""

    @property
    def resumed_from(self) -> ResumedFrom | None: ...


_P = TypeVar("_P", bound=Placed)


def lineage_of(ran: Iterable[Ran], saved: Iterable[Saved]) -> dict[int, int | None]:
    """The lineage of a job of which these generations and checkpoints are known.

    Only generations that committed a step are links (a checkpoint past step 0 proves it as well as
    a report); first weights are where a chain may end, and its newest end only while nothing was
    trained.
    """
    ran, saved = tuple(ran), tuple(saved)
    known = {g.number: g.resumed_from for g in ran}
    links = {g.number: g.resumed_from for g in ran if g.committed > 0}
    for found in saved:
        if found.step > 0:
            links.setdefault(found.generation, known.get(found.generation, found.resumed_from))
    newest_link = max(links, default=None)
    for found in saved:
        if found.step == 0:
            links.setdefault(found.generation, None)
    return lineage(links, newest_link)


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
