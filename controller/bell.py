"""Waking those who wait: a courtesy, never the truth.

The rows are the truth; whoever is woken looks again, and looks now and then even when nobody rings.
"""

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

RECONCILER = "reconciler"
FEED = "feed"
"""Something was written that a page may show."""


class Bell:
    """One bell for all; waiters listen for a key. To be used on the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Hashable, set[asyncio.Event]] = defaultdict(set)

    @contextmanager
    def listen(self, key: Hashable) -> Iterator[asyncio.Event]:
        """An event that is set at every ring for ``key`` from now on; clear it BEFORE you look."""
        event = asyncio.Event()
        self._waiting[key].add(event)
        try:
            yield event
        finally:
            self._waiting[key].discard(event)
            if not self._waiting[key]:
                del self._waiting[key]

    def ring(self, *keys: Hashable) -> None:
        """Wake who listens for one of ``keys``."""
        self.ring_each(keys)

    def ring_each(self, keys: Iterable[Hashable]) -> None:
        """The same for many."""
        for key in keys:
            for event in self._waiting.get(key, ()):
                event.set()

    def ring_all(self) -> None:
        """Wake everybody: it is time to go."""
        self.ring_each(tuple(self._waiting))
