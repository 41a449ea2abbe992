"""The door to whoever gives machines. Small on purpose: what a cloud calls a set, a pool or an LRO
stays behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Machine:
    """One machine, by the name that its agent registers under."""

    name: str
    state: Literal["creating", "running", "gone"]


class CloudError(Exception):
    """The provider said no or could not be asked, as one sentence for a person."""


class Cloud(Protocol):
    """Every call is idempotent by name. Raises :class:`CloudError`."""

    def create(self, names: Sequence[str]) -> None:
        """Ask for machines; a name that lives already is left alone."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Give machines back, at once; a name that is gone already is no error."""
        ...

    def list(self) -> tuple[Machine, ...]:
        """All machines that were asked for."""
        ...
