"""What so many nodes get done, by the planner or by a plain table. PURE."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from controller.planner.choose import Choice, Planner
from controller.planner.trace import is_number, number_at


@dataclass(frozen=True)
class Pace:
    """What a number of nodes gets done."""

    step_seconds: float
    nodes: int
    """So many of them work; the rest is spare."""
    depth: int | None = None
    """Stages, if known: then survivors of a loss may hold every layer."""
    devices_per_node: int = 1


class Paces(Protocol):
    """Who knows what so many nodes get done; None: no plan fits."""

    def of(self, nodes: int) -> Pace | None: ...


class Planned:
    """By the planner, on measured costs."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def of(self, nodes: int) -> Pace | None:
        """Play the best shape."""
        per_node = self._planner.problem.devices_per_node
        found = self._planner.choose(nodes * per_node)
        if not isinstance(found, Choice):
            return None
        used = -(-found.shape.world // per_node)
        return Pace(found.seconds, used, found.shape.depth, per_node)


class Tabled:
    """By a plain table: devices -> samples a second; between two rows on the line through them,
    above the last as the last, below the first no plan. ``depth``: stages, when they are known.
    """

    def __init__(
        self, rows: Iterable[tuple[int, float]], batch_size: int, depth: int | None = None
    ) -> None:
        self._rows = sorted(rows)
        self._batch_size = batch_size
        self._depth = depth

    @classmethod
    def read(cls, text: str, batch_size: int, depth: int | None = None) -> "Tabled":
        """CSV with the columns ``devices,samples_per_second``. Raises ValueError."""
        rows = []
        for number, row in enumerate(csv.reader(text.splitlines()), start=1):
            if len(row) == 2 and not (number == 1 and not is_number(row[0])):
                devices, rate = number_at(row[0], number), number_at(row[1], number)
                if devices < 1 or devices % 1 or rate <= 0:
                    raise ValueError(f"line {number}: whole devices, each row more than nothing")
                rows.append((int(devices), rate))
        if not rows:
            raise ValueError("a throughput table has the columns devices,samples_per_second")
        return cls(rows, batch_size, depth)

    def of(self, nodes: int) -> Pace | None:
        """Look it up."""
        if nodes < self._rows[0][0]:
            return None
        below = max((row for row in self._rows if row[0] <= nodes), key=lambda row: row[0])
        above = min((row for row in self._rows if row[0] >= nodes), default=below)
        part = (nodes - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        rate = below[1] + part * (above[1] - below[1])
        return Pace(self._batch_size / rate, min(nodes, self._rows[-1][0]), self._depth)
