"""What an agent has to tell, numbered, kept until the controller says that it is durable. PURE."""

from collections import deque

from agent.wire import Looked, OrderDone, Report, ReportBody, SetAside

_MOST_AT_ONCE = 500


class Outbox:
    """Reports numbered from 1 for one incarnation; none is forgotten before it is acknowledged."""

    def __init__(self) -> None:
        self._waiting: deque[Report] = deque()
        self._last = 0

    def add(self, body: ReportBody) -> None:
        """Number ``body`` and keep it."""
        self._last += 1
        self._waiting.append(Report(number=self._last, body=body))

    def next_batch(self, most: int = _MOST_AT_ONCE) -> tuple[Report, ...]:
        """The oldest that are not durable, without a gap; the same ones until they are."""
        return tuple(self._waiting[i] for i in range(min(len(self._waiting), most, _MOST_AT_ONCE)))

    def set_aside(self, because: str) -> None:
        """The oldest was refused and always will be: say so in its place."""
        refused = self._waiting.popleft()
        said = SetAside(
            refused=refused.body.kind,
            because=because[:500],
            job=getattr(refused.body, "job", None),
            generation=getattr(refused.body, "generation", None),
        )
        self._waiting.appendleft(Report(number=refused.number, body=said))

    def acknowledge(self, durable: int) -> None:
        """All up to ``durable`` may be forgotten. A lower number than before changes nothing."""
        while self._waiting and self._waiting[0].number <= durable:
            self._waiting.popleft()

    def resume(self, durable: int) -> bool:
        """Go on at a controller that says it holds reports up to ``durable``.

        Whether it holds less than was acknowledged: its store is an old copy, and what waits gets
        the numbers after ``durable``. Answers to orders that the copy never gave go nowhere.
        """
        is_old_copy = durable < self._last - len(self._waiting)
        if is_old_copy:
            bodies = [r.body for r in self._waiting if not isinstance(r.body, OrderDone | Looked)]
            self._waiting.clear()
            self._last = durable
            for body in bodies:
                self.add(body)
        else:
            self.acknowledge(durable)
        return is_old_copy
