"""Reading what the ranks of a run wrote with :mod:`tests.bench.programs.clocked_gpt`."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Tick:
    """Process ``pid`` had step ``step`` applied ``at`` (monotonic seconds of this machine)."""

    at: float
    pid: int
    step: int


@dataclass(frozen=True)
class Gap:
    """From a loss to the first new step on all ranks."""

    seconds: float
    pause: float
    """From the last step that any rank had applied before, however long after the loss."""
    last_step: int
    """The last one that any rank had applied before."""
    first_step: int
    """The first one after; not above ``last_step`` when steps were lost."""
    ranks: int

    @property
    def lost_steps(self) -> int:
        """How many were done twice."""
        return self.last_step + 1 - self.first_step


class Clock:
    """The file that the ranks append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ticks(self) -> list[Tick]:
        """All so far, of real steps."""
        return list(self._read())

    def pids(self) -> frozenset[int]:
        """Who has ticked so far."""
        return frozenset(tick.pid for tick in self._read())

    def everywhere(self, ranks: int) -> int:
        """The last step that ``ranks`` processes have done; 0: none."""
        return max((step for step, ticks in self._by_step() if len(ticks) >= ranks), default=0)

    def step_seconds(self) -> float | None:
        """Median from one step to the next of the same process."""
        times: dict[int, list[float]] = defaultdict(list)
        for tick in self._read():
            times[tick.pid].append(tick.at)
        steps = [b - a for one in times.values() for a, b in pairwise(one)]
        return statistics.median(steps) if steps else None

    def begun(self, before: frozenset[int]) -> bool:
        """Whether any process that is not among ``before`` has done a step."""
        return any(tick.pid not in before for tick in self._read())

    def gap(self, since: float, before: frozenset[int], ranks: int) -> Gap | None:
        """From ``since`` until ``ranks`` processes that are not among ``before`` had done the same
        step for the first time; None when they have not yet.
        """
        old = [tick for tick in self._read() if tick.pid in before]
        last_step, last_at = max(tick.step for tick in old), max(tick.at for tick in old)
        for step, ticks in self._by_step():
            new = {tick.pid: tick.at for tick in ticks if tick.pid not in before}
            if len(new) == ranks:
                at = max(new.values())
                return Gap(at - since, at - last_at, last_step, step, ranks)
        return None

    def _by_step(self) -> list[tuple[int, list[Tick]]]:
        found: dict[int, list[Tick]] = defaultdict(list)
        for tick in self._read():
            found[tick.step].append(tick)
        return sorted(found.items())

    def _read(self) -> Iterator[Tick]:
        if not self.path.exists():
            return
        *lines, _ = self.path.read_text().split("\n")  # what is after the last \n is half a line
        for line in lines:
            at, pid, step = line.split()
            if int(step) > 0:
                yield Tick(float(at), int(pid), int(step))
