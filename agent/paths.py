"""Which of its peers this node reaches: a TCP connection to each, all at once."""

import asyncio
from collections.abc import Iterable

from agent.wire import Peer

_SECONDS = 2.0
"""A connection takes milliseconds in a private network; one that swallows packets never answers."""


async def unreached(peers: Iterable[Peer], seconds: float = _SECONDS) -> tuple[str, ...]:
    """The names of those that no connection can be made to."""
    asked = tuple(peers)
    found = await asyncio.gather(*(_reaches(peer, seconds) for peer in asked))
    return tuple(peer.node for peer, is_there in zip(asked, found, strict=True) if not is_there)


async def _reaches(peer: Peer, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(peer.host, peer.port)
    except OSError:  # TimeoutError too
        return False
    writer.close()
    return True
