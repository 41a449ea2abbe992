"""Links between agents and their controller that can be cut: a small TCP proxy on loopback, with a
port for each node.

A cut link carries nothing either way and closes nothing, as when a cable is pulled: who waits,
waits. When it is mended all goes on; where the far end went meanwhile, the near one is told.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_HOST = "127.0.0.1"
_PIECE = 1 << 16


@dataclass
class _Link:
    listening: socket.socket
    carries: threading.Event = field(default_factory=threading.Event)
    ends: set[socket.socket] = field(default_factory=set)


class Links:
    """Links to the controller whose port ``port`` gives. A context manager."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._port = port
        self._links: dict[str, _Link] = {}
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_over = True
        for link in self._links.values():
            link.carries.set()
            for end in (link.listening, *link.ends):
                _shut(end)

    def url(self, node: str) -> str:
        """Where ``node`` finds the controller."""
        if node not in self._links:
            link = self._links[node] = _Link(socket.create_server((_HOST, 0)))
            link.carries.set()
            threading.Thread(target=self._accept, args=(link,), daemon=True).start()
        return f"http://{_HOST}:{self._links[node].listening.getsockname()[1]}"

    def cut(self, node: str) -> None:
        """Nothing passes from now on."""
        self._links[node].carries.clear()

    def mend(self, node: str) -> None:
        """What waited passes."""
        self._links[node].carries.set()

    def _accept(self, link: _Link) -> None:
        with link.listening:
            while not self._is_over:
                try:
                    near, _ = link.listening.accept()
                except OSError:
                    return
                link.ends.add(near)
                threading.Thread(target=self._join, args=(link, near), daemon=True).start()

    def _join(self, link: _Link, near: socket.socket) -> None:
        link.carries.wait()
        try:
            far = socket.create_connection((_HOST, self._port()))
        except OSError:
            link.ends.discard(near)
            near.close()
            return
        link.ends.add(far)
        back = threading.Thread(target=_carry, args=(link, far, near), daemon=True)
        back.start()
        _carry(link, near, far)
        back.join()
        for end in (near, far):
            link.ends.discard(end)
            end.close()


def _carry(link: _Link, source: socket.socket, sink: socket.socket) -> None:
    """Until either end is gone; then both are."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            link.carries.wait()
            sink.sendall(piece)
        link.carries.wait()  # an end is news too
    _shut(source)
    _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
