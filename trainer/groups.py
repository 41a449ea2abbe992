"""Meeting the other ranks of a generation: interface, store, process groups, and their sockets.

All groups are made here, at the start, so that the store may be lost later. Whose socket is whose
is found out once, for the control thread to watch. The groups are gloo's and NCCL's own objects:
torch's ``new_group`` wants every rank at every group, or names a group by how many a rank has made.

On GPUs gradients are summed by NCCL. It works on the GPU's stream: a call returns at once, and a
peer that died is no error but a kernel that never ends. The vote and the links stay gloo's, whose
sockets tell of that death; the control thread then aborts NCCL.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
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
from trainer.device import CPU, Device

_LOOK_SECONDS = 5e-5
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Torch's own watchdog stands by: it would take the process down, and with it the state that a
halted trainer keeps.
"""


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
        self._backend = self._made(store, self._ranks.index(me), len(ranks), timeout)

    def _made(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Any: the stubs do not know the operations."""
        return ProcessGroupGloo(store, rank, size, timeout)

    def sum(self, *tensors: Tensor) -> None:
        """Replace each by its sum over all ranks."""
        with _blaming(self._others):
            self._wait([self._backend.allreduce([tensor]) for tensor in tensors])

    def share(self, tensor: Tensor, source: int) -> None:
        """Replace it by rank ``source``'s."""
        with _blaming(self._others):
            self._wait([self._backend.broadcast(tensor, self._ranks.index(source))])

    def settle(self) -> None:
        """Return once what was summed and shared can be relied on; with gloo it always can."""

    def abort(self) -> None:
        """End what no socket ends; with gloo there is nothing."""

    def _wait(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's, in rank order; all of one shape."""
        every = [torch.empty_like(tensor) for _ in self._ranks]
        with _blaming(self._others):
            self._backend.allgather([every], [tensor]).wait()
        return every

    def send(self, tensor: Tensor, to: int, tag: int) -> "Sending":
        """Start to send; ``tensor`` must not change until that has ended."""
        with _blaming((to,)):
            return Sending(self._backend.send([tensor], self._ranks.index(to), tag), tensor, to)

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Wait for a message and put it into ``tensor``."""
        with _blaming((source,)):
            self._backend.recv([tensor], self._ranks.index(source), tag).wait()


class NcclGroup(Group):
    """The same for tensors on GPUs, :meth:`sum` and :meth:`share` alone."""

    def __init__(
        self, ranks: Sequence[int], me: int, store: Store, timeout: timedelta, device: Device
    ) -> None:
        """Meets the others, each of whom must come. Raises RuntimeError, PeerLostError."""
        self._device = device
        self._newest: Work | None = None
        self._is_aborted = threading.Event()
        super().__init__(ranks, me, store, timeout)
        self.sum(torch.zeros(1, device=device.torch))  # the first call makes the communicator
        self.settle()

    def _made(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
        if nccl is None:
            raise RuntimeError("this torch is built without NCCL")
        os.environ |= _NCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)

    def _wait(self, works: Sequence[Work]) -> None:
        """Only the GPU's stream waits."""
        super()._wait(works)
        self._newest = works[-1] if works else self._newest

    def settle(self) -> None:
        """Return once all of it is on the GPU, whole. Raises PeerLostError.

        It looks again and again instead of waiting in the driver: a thread that waits there can
        keep an abort from ending what it waits for.
        """
        mark = self._device.mark()
        while not (self._is_newest_over() and self._device.is_reached(mark)):
            time.sleep(_LOOK_SECONDS)
        self._newest = None

    def _is_newest_over(self) -> bool:
        """``is_completed`` asks NCCL for errors too."""
        is_over = self._newest is None or self._newest.is_completed()
        if self._is_aborted.is_set():
            raise PeerLostError(self._others, "NCCL was aborted")
        if is_over and self._newest and (error := self._newest.exception()) is not None:
            raise PeerLostError(self._others, f"NCCL: {error}".partition("\n")[0])
        return is_over

    def abort(self) -> None:
        """End what is under way on the GPU; beside whoever calls, for it may take its time."""
        if not self._is_aborted.is_set():
            self._is_aborted.set()
            threading.Thread(target=self._backend.abort, name="abort-nccl", daemon=True).start()


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

    def settle(self) -> None:
        """Return once all sums can be relied on. Raises PeerLostError."""
        for group in self._summing():
            group.settle()

    def abort(self) -> None:
        """End every wait that no socket ends; returns at once."""
        for group in self._summing():
            group.abort()

    def _summing(self) -> list[Group]:
        return [*([self.replicas] if self.replicas else []), *self.ties.values()]


def meet(spec: RunSpec, tied_stages: Iterable[tuple[int, ...]], device: Device = CPU) -> Groups:
    """Make all process groups of ``spec``'s rank; a world of one rank meets nobody.

    ``tied_stages``: the sets of stages that hold a weight together. Raises RendezvousError.
    """
    if spec.shape.world == 1:
        return Groups()
    if spec.store is None:
        raise ValueError(f"a world of {spec.shape.world} ranks needs a store")
    interface = interface_of(spec.data_host)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # an operator may know better
    try:
        return _meet(spec, spec.store, tied_stages, device)
    except (RuntimeError, PeerLostError) as error:
        raise RendezvousError(f"could not meet the other ranks: {error}") from error


def _meet(
    spec: RunSpec, address: Address, tied_stages: Iterable[tuple[int, ...]], device: Device
) -> Groups:
    shape, timeout = spec.shape, timedelta(seconds=spec.timeout_seconds)
    store = TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    before = _descriptors()

    def prefixed(name: str) -> PrefixStore:
        return PrefixStore(f"{spec.job}/{spec.generation}/{name}", store)

    def gloo(name: str, ranks: Sequence[int]) -> Group:
        return Group(ranks, spec.rank, prefixed(name), timeout)

    def nccl(name: str, ranks: Sequence[int]) -> Group:
        return NcclGroup(ranks, spec.rank, prefixed(name), timeout, device)

    me = Seat.of(spec.rank, shape)
    with_my_stage = {stages for stages in tied_stages if me.stage in stages and len(stages) > 1}

    def summing(
        group: Callable[[str, Sequence[int]], Group],
    ) -> tuple[Group | None, dict[tuple[int, ...], Group]]:
        of_my_stage = [Seat(me.stage, replica).rank(shape) for replica in range(shape.replicas)]
        replicas = group(f"stage-{me.stage}", of_my_stage) if shape.replicas > 1 else None
        ties = {
            stages: group(
                f"replica-{me.replica}-stages-{stages}",
                [Seat(s, me.replica).rank(shape) for s in stages],
            )
            for stages in sorted(with_my_stage)
        }
        return replicas, ties

    world = gloo("world", range(shape.world))
    if device.kind == "cuda":  # NCCL opens and closes sockets as it likes: not to be watched
        sockets = _whose(_connected(_descriptors() - before), world)
        return Groups(world, *summing(nccl), sockets)
    replicas, ties = summing(gloo)
    return Groups(world, replicas, ties, _whose(_connected(_descriptors() - before), world))


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
