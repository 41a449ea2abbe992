"""What the controller is made of, as one value that routers and pages are handed."""

import asyncio
import secrets
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from controller.bell import Bell
from controller.clock import Clock
from controller.logs import Logs
from controller.presence import Presence
from controller.settings import Settings
from controller.store.engine import Store
from controller.store.tokens import Tokens


@dataclass
class Parts:
    """Built in :mod:`controller.app`, once per process."""

    settings: Settings
    clock: Clock
    store: Store
    tokens: Tokens
    presence: Presence
    bell: Bell
    logs: Logs
    loop: asyncio.AbstractEventLoop
    boot_id: str
    """Of the controller's machine."""
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at every start."""
    closing: bool = False
    """The end has begun: parked requests and streams are to end now."""
    looked_at: float = 0.0
    """When the reconciler last looked at the world."""
    dropped_reports: int = 0
    """Since the start: they were of ended generations, or of seats that others hold."""

    @property
    def bundles(self) -> Path:
        """Where uploaded bundles lie."""
        return self.settings.data / "bundles"

    def ring(self, *keys: Hashable) -> None:
        """Ring from any thread; the bell itself is the loop's."""
        self.loop.call_soon_threadsafe(self.bell.ring, *keys)

    def close_down(self) -> None:
        """Let everybody who waits go; breaking requests are our own doing from now on."""
        self.closing = True
        self.bell.ring_all()
