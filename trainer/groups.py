"""Meeting the other ranks of a generation: interface, store, process groups, and their sockets.

All groups are made here, at the start, so that the store may be lost later. Whose socket is whose
is found out once, for the control thread to watch. The groups are gloo's own objects: torch's
``new_group`` wants every rank at every group, or names a group by how many a rank has made before.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch's stubs miss some
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from trainer.contract.spec import Address, RunSpec
from trainer.contract.topology import Seat


class PeerLostError(Exception):
    """A call that needs other ranks failed; ``ranks`` are those it can have been."""

    def __init__(self, ranks: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.ranks = tuple(ranks)


class RendezvousError(Exception):
    """The ranks did not all come together."""


class Group:
    """Ranks that compute something together. All methods raise PeerLostError."""

    def __init__(self, ranks: Sequence[int], me: int, store: Store, timeout: timedelta) -> None:
        """Meets the others, each of whom must come. Raises RuntimeError."""
        self._ranks = tuple(ranks)
        self._others = tuple(rank for rank in ranks if rank != me)
        # Any: the stubs do not know the operations
        self._gloo: Any = ProcessGroupGloo(store, self._ranks.index(me), len(ranks), timeout)

    def sum(self, *tensors: Tensor) -> None:
        """Replace each by its sum over all ranks."""
        with _blaming(self._others):
            works: list[Work] = [self._gloo.allreduce([tensor]) for tensor in tensors]
            for work in works:
                work.wait()

    def share(self, tensor: Tensor, source: int) -> None:
        """Replace it by rank ``source``'s."""
        with _blaming(self._others):
            self._gloo.broadcast(tensor, self._ranks.index(source)).wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's, in rank order; all of one shape."""
        every = [torch.empty_like(tensor) for _ in self._ranks]
        with _blaming(self._others):
            self._gloo.allgather([every], [tensor]).wait()
        return every

    def send(self, tensor: Tensor, to: int, tag: int) -> "Sending":
        """Start to send; ``tensor`` must not change until that has ended."""
        with _blaming((to,)):
            return Sending(self._gloo.send([tensor], self._ranks.index(to), tag), tensor, to)

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Wait for a message and put it into ``tensor``."""
        with _blaming((source,)):
            self._gloo.recv([tensor], self._ranks.index(source), tag).wait()


@dataclass(frozen=True)
class Sending:
    """A message on its way; keeps the tensor alive."""

    work: Work
    tensor: Tensor
    to: int

    def wait(self) -> None:
        """Until it is out. Raises PeerLostError."""
        with _blaming((self.to,)):
            self.work.wait()


@contextmanager
def _blaming(ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(ranks, str(error).partition("\n")[0]) from error


@dataclass(frozen=True)
class Groups:
    """This rank's groups; a group of one rank is None."""

    world: Group | None = None
    replicas: Group | None = None
    """The ranks of this stage."""
    ties: Mapping[tuple[int, ...], Group] = field(default_factory=dict)
    """By the stages that hold a tied weight: their ranks in this replica."""
    sockets: Mapping[socket.socket, int | None] = field(default_factory=dict)
    """Duplicates of every connected socket of the groups, with the rank at the other end (None
    where addresses are translated on the way).
    """


def meet(spec: RunSpec, tied_stages: Iterable[tuple[int, ...]]) -> Groups:
    """Make all process groups of ``spec``'s rank; a world of one rank meets nobody.

    ``tied_stages``: the sets of stages that hold a weight together. Raises RendezvousError.
    """
    if spec.shape.world == 1:
        return Groups()
    if spec.store is None:
        raise ValueError(f"a world of {spec.shape.world} ranks needs a store")
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(spec.data_host)
    try:
        return _meet(spec, spec.store, tied_stages)
    except (RuntimeError, PeerLostError) as error:
        raise RendezvousError(f"could not meet the other ranks: {error}") from error


def _meet(spec: RunSpec, address: Address, tied_stages: Iterable[tuple[int, ...]]) -> Groups:
    shape, timeout = spec.shape, timedelta(seconds=spec.timeout_seconds)
    store = TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    before = _descriptors()

    def group(name: str, ranks: Sequence[int]) -> Group:
        prefix = f"{spec.job}/{spec.generation}/{name}"
        return Group(ranks, spec.rank, PrefixStore(prefix, store), timeout)

    me = Seat.of(spec.rank, shape)
    of_my_stage = [Seat(me.stage, replica).rank(shape) for replica in range(shape.replicas)]
    with_my_stage = {stages for stages in tied_stages if me.stage in stages and len(stages) > 1}
    world = group("world", range(shape.world))
    replicas = group(f"stage-{me.stage}", of_my_stage) if shape.replicas > 1 else None
    ties = {
        stages: group(
            f"replica-{me.replica}-stages-{stages}",
            [Seat(s, me.replica).rank(shape) for s in stages],
        )
        for stages in sorted(with_my_stage)
    }
    sockets = _connected(_descriptors() - before)
    return Groups(world, replicas, ties, _whose(sockets, world))


def interface_of(host: str) -> str:
    """The name of this machine's network interface that has the address ``host``."""
    wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    raise ValueError(f"no network interface of this machine has the address {host}")


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _connected(descriptors: Iterable[int]) -> list[socket.socket]:
    """Duplicates of those that are connected sockets.

    A duplicate stays ours when gloo closes its own, whose number may then be somebody else's.
    """
    found = []
    for descriptor in descriptors:
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(descriptor))
            try:
                duplicate.getpeername()
            except OSError:
                duplicate.close()
            else:
                found.append(duplicate)
    return found


def _whose(sockets: Sequence[socket.socket], world: Group) -> dict[socket.socket, int | None]:
    """The rank at the other end of each: the one that calls that end's address its own."""
    own = json.dumps([one.getsockname() for one in sockets]).encode()
    longest = max(int(length) for length in world.gather(torch.tensor(len(own))))
    padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8)
    rank_of = {
        tuple(address): rank
        for rank, text in enumerate(world.gather(padded))
        for address in json.loads(text.numpy().tobytes())
    }
    return {one: rank_of.get(tuple(one.getpeername())) for one in sockets}
