"""Who was heard when: the one thing that lives in memory alone, and may.

Beats are facts of the moment; the store gets the times in one batch now and then. Everything here
happens on the event loop's thread; :meth:`Presence.signs` is a copy for others.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from agent import wire
from controller.store.snapshot import Sign

NodeKey = tuple[str, str]
"""(name, incarnation)."""


_SILENCE_SECONDS = 2.0
"""Two beats: a longer gap is kept in mind, since there may be news that we do not know yet..."""
_SILENCES_KEPT = 256
"""... so many of the newest."""


@dataclass
class _Known:
    heard_at: float
    reported: int
    parked: int = 0
    suspect_since: float | None = None
    silences: tuple[tuple[float, float], ...] = ()
    beat: wire.Beat | None = None


class Presence:
    """The live incarnations and their newest signs of life."""

    def __init__(self) -> None:
        self._known: dict[NodeKey, _Known] = {}

    def admit(self, key: NodeKey, reported: int, at: float) -> None:
        """A registered incarnation; older ones of its name are out."""
        self.dismiss(old for old in self._known if old[0] == key[0] and old != key)
        known = self._known.setdefault(key, _Known(at, reported))
        known.heard_at, known.reported, known.suspect_since = at, reported, None

    def dismiss(self, keys: Iterable[NodeKey]) -> None:
        """Incarnations that are over."""
        for key in list(keys):
            self._known.pop(key, None)

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._known

    def heard(self, key: NodeKey, at: float) -> None:
        """Something came from it."""
        if known := self._known.get(key):
            if at - known.heard_at > _SILENCE_SECONDS:
                gap = (known.heard_at, at)
                known.silences = (*known.silences, gap)[-_SILENCES_KEPT:]
            known.heard_at = max(known.heard_at, at)

    def beat(self, key: NodeKey, beat: wire.Beat, at: float) -> int:
        """A beat of a known incarnation; its last durable report."""
        self.heard(key, at)
        self._known[key].beat = beat
        return self._known[key].reported

    def reported(self, key: NodeKey, number: int) -> None:
        """Its reports are durable up to ``number``."""
        if known := self._known.get(key):
            known.reported = max(known.reported, number)

    def parked(self, key: NodeKey, at: float) -> None:
        """It has parked an order request: nothing is broken between us."""
        if known := self._known.get(key):
            known.parked += 1
            known.suspect_since = None
        self.heard(key, at)

    def left(self, key: NodeKey, at: float, *, broken: bool) -> bool:
        """A parked request is over: answered, or ``broken``. Whether that makes it suspect."""
        known = self._known.get(key)
        if known is None:
            return False
        known.parked -= 1
        if broken and known.parked <= 0 and known.suspect_since is None:
            known.suspect_since = at
            return True
        return False

    def signs(self) -> dict[NodeKey, Sign]:
        """A copy, for a decision."""
        return {key: _sign(known) for key, known in self._known.items()}

    def sign(self, key: NodeKey) -> Sign | None:
        """Of one node."""
        known = self._known.get(key)
        return _sign(known) if known else None

    def newest_beat(self, key: NodeKey) -> wire.Beat | None:
        """The last beat heard."""
        known = self._known.get(key)
        return known.beat if known else None


def _sign(known: _Known) -> Sign:
    return Sign(known.heard_at, known.suspect_since, known.silences)
