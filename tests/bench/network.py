"""Nodes with a network each, on two switches; their cables can be pulled.

    hub: whoever made it, the controller         10.78.0.1 on switch "control"
    node n: an agent, its zygote, trainers       10.77.0.n on switch "peers"
                                                 10.77.0.n is reached by "control" from the hub

So trainers talk over "peers" and agents to their controller over "control", though a node has one
address, and either can be cut, or both. Nothing closes when a cable is pulled: who waits, waits.

Every network is a name space that has no name. It is kept by a descriptor of this process and by
what runs in it, and is gone with the last of them, however that ends. Needs root and `ip`.
"""

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Self

from controller.client.cluster import Cluster
from controller.cloud.local import LocalFleet
from controller.cloud.port import Machine

CONTROL, PEERS = "control", "peers"
"""The switches, and a node's plug for each."""
HUB = "10.78.0.1"
_NODES = "10.77.0"
_HERE = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why there can be no such network here, as a sentence; None: there can."""
    try:
        subprocess.run(["unshare", "--net", "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "Only root can make networks whose cables can be pulled, with `ip` of iproute2."
    return None


class Network:
    """The hub and its nodes. A context manager, to be used from one thread: within it that thread,
    and what it starts, is in the hub.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        """A descriptor of the node's network."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            home = _opened(stack)
            _leave()
            stack.callback(_enter, home)
            self._hub = _opened(stack)
            _ip("link set lo up")
            for switch in (CONTROL, PEERS):
                _ip(f"link add {switch} type bridge")
                _ip(f"link set {switch} up")
            _ip(f"address add {HUB}/32 dev {CONTROL}")
            _ip(f"route add {_NODES}.0/24 dev {CONTROL} src {HUB}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, name: str) -> None:
        """A node, with both cables plugged."""
        number = len(self._nodes) + 1
        _leave()
        try:
            self._nodes[name] = _opened(self._stack)
            hub = f"/proc/{os.getpid()}/fd/{self._hub}"
            _ip("link set lo up")
            for switch in (CONTROL, PEERS):
                _ip(f"link add {switch} type veth peer name {switch}-{number} netns {hub}")
                _ip(f"link set {switch} up")
            _ip(f"address add {_NODES}.{number}/24 dev {PEERS}")
            _ip(f"route add {HUB} dev {CONTROL} src {_NODES}.{number}")
        finally:
            _enter(self._hub)
        for switch in (CONTROL, PEERS):
            _ip(f"link set {switch}-{number} master {switch} up")

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What is started here is on node ``name``."""
        _enter(self._nodes[name])
        try:
            yield
        finally:
            _enter(self._hub)

    def cut(self, name: str, switches: Sequence[str]) -> float:
        """Pull the node's cables out of ``switches``; when that began (monotonic)."""
        number = list(self._nodes).index(name) + 1
        began = time.monotonic()
        for switch in switches:
            _ip(f"link set {switch}-{number} down")
        return began


class WiredFleet:
    """As a :class:`LocalFleet`, but each node is on a network of its own, and imports torch itself.
    A context manager, within its network's.
    """

    def __init__(self, network: Network, cluster: Cluster) -> None:
        self.network = network
        self._cluster = cluster
        self._nodes: dict[str, LocalFleet] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete(tuple(self._nodes))

    def create(self, names: Sequence[str]) -> None:
        """Start them; torch is imported on all at the same time."""
        for name in names:
            self.network.add(name)
            with self.network.inside(name):
                self._nodes[name] = self._alone().__enter__()
        for name in names:
            with self.network.inside(name):
                self._nodes[name].wait_for_torch()
                self._nodes[name].create([name])

    def delete(self, names: Sequence[str]) -> None:
        """SIGKILL all that runs there."""
        for name in names:
            self._nodes.pop(name).__exit__(None, None, None)

    def list(self) -> tuple[Machine, ...]:
        """Every node that was made and not deleted."""
        return tuple(machine for node in self._nodes.values() for machine in node.list())

    def pids(self, name: str) -> tuple[int, int]:
        """Its agent and its zygote."""
        return self._nodes[name].pids(name)

    def notice(self, name: str, seconds: float) -> None:
        """Tell it that it goes."""
        self._nodes[name].notice(name, seconds)

    def _alone(self) -> LocalFleet:
        """For one node."""
        folder = self._cluster.folder
        return LocalFleet(
            self._cluster.controller.place.url, folder / "agent.token", folder / "agents"
        )


def _opened(stack: contextlib.ExitStack) -> int:
    """A descriptor of this thread's network."""
    here = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, here)
    return here


def _leave() -> None:
    """Be in a new network, with nothing in it."""
    if _LIBC.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot make a network")


def _enter(network: int) -> None:
    if _LIBC.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
