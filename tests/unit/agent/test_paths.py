"""Whom a node reaches."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from agent.paths import unreached
from agent.wire import Peer


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """One that listens, one that does not."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        bound = stack.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        yield listening.getsockname()[1], bound.getsockname()[1]


def test_who_listens_is_reached_and_who_does_not_is_named(ports: tuple[int, int]) -> None:
    peers = [Peer(node=f"vm-{port}", host="127.0.0.1", port=port) for port in ports]
    assert asyncio.run(unreached(peers)) == (f"vm-{ports[1]}",)


def test_a_path_that_swallows_packets_is_not_waited_for_long() -> None:
    """A backlog that is full answers nobody, as a firewall that drops."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        host, port = silent.getsockname()
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, port))
        assert asyncio.run(unreached([Peer(node="a", host=host, port=port)], 0.2)) == ("a",)


def test_nobody_to_reach_is_nobody_missed() -> None:
    assert asyncio.run(unreached([])) == ()
