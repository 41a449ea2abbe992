"""Meeting the other ranks of a generation: interface, store, process groups, and their sockets.

All groups are made here, at the start, so that the store may be lost later. Whose socket is whose
is found out once, for the control thread to watch.
"""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainer.contract.spec import Address, RunSpec
from trainer.contract.topology import Seat


class PeerLostError(Exception):
    """A call that needs other ranks failed; ``ranks`` are those it can have been."""

    def __init__(self, ranks: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.ranks = tuple(ranks)


class RendezvousError(Exception):
    """The ranks did not all come together."""


@contextmanager
def blaming_peers(ranks: Sequence[int]) -> Iterator[None]:
    """Turn the error of a call on a process group into a PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(ranks, str(error).partition("\n")[0]) from error


@dataclass(frozen=True)
class Group:
    """Ranks that compute something together."""

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None


@dataclass(frozen=True)
class Groups:
    """This rank's groups; a group of one rank is None."""

    world: Group | None = None
    replicas: Group | None = None
    """The ranks of this stage."""
    ties: dict[tuple[int, ...], Group] = field(default_factory=dict)
    """By the stages that hold a tied weight: their ranks in this replica."""
    sockets: dict[socket.socket, int] = field(default_factory=dict)
    """Duplicates of every connected socket of the groups, with the rank at the other end."""


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
    except RuntimeError as error:
        raise RendezvousError(f"could not meet the other ranks: {error}") from error


def _meet(spec: RunSpec, address: Address, tied_stages: Iterable[tuple[int, ...]]) -> Groups:
    shape, timeout = spec.shape, timedelta(seconds=spec.timeout_seconds)
    store = TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    before = _descriptors()
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"{spec.job}/{spec.generation}", store),
        rank=spec.rank,
        world_size=shape.world,
        timeout=timeout,
    )
    seat = Seat.of(spec.rank, shape)
    of_my_stage = [Seat(seat.stage, r).rank(shape) for r in range(shape.replicas)]
    with_my_stage = {s for s in tied_stages if seat.stage in s and len(s) > 1}
    groups = Groups(
        world=Group(tuple(range(shape.world)), dist.group.WORLD),
        replicas=_group(of_my_stage, timeout) if shape.replicas > 1 else None,
        ties={
            stages: _group([Seat(s, seat.replica).rank(shape) for s in stages], timeout)
            for stages in sorted(with_my_stage)
        },
    )
    groups.sockets.update(_whose(_connected(_descriptors() - before), shape.world))
    return groups


def interface_of(host: str) -> str:
    """The name of this machine's network interface that has the address ``host``."""
    wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    raise ValueError(f"no network interface of this machine has the address {host}")


def _group(ranks: Sequence[int], timeout: timedelta) -> Group:
    handle = dist.new_group(
        list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
    )
    return Group(tuple(ranks), handle)


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


def _whose(sockets: Sequence[socket.socket], world: int) -> dict[socket.socket, int]:
    """The rank at the other end of each: the one that calls that end's address its own."""
    own = [one.getsockname() for one in sockets]
    every: list[list[object]] = [[] for _ in range(world)]
    dist.all_gather_object(every, own)
    rank_of = {address: rank for rank, addresses in enumerate(every) for address in addresses}
    return {one: rank_of[one.getpeername()] for one in sockets}
