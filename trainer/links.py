"""Activations to the next stage and gradients to the one before.

Gloo cannot say whether a message has come without waiting for it, so each direction has a thread
that does nothing but receive, into a dict that the main loop reads:

    previous stage  --F-->  [receiver F]  \\          / send F -->  next stage
                                          main loop
    previous stage  <--B send            /          \\  [receiver B]  <--B--  next stage

Messages of one direction come in micro-batch order, each with a tag of its own. What the messages
of one micro-batch size look like is agreed once, by a header before the first of them. A failure
of a link reaches the main loop as a PeerLostError that names the rank.

Gloo carries host memory. What goes to a GPU or comes from one is copied by the main thread, in the
order of its other work (:mod:`trainer.device`).
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainer.contract.schedule import OUTSTANDING, Kind
from trainer.device import CPU, Device
from trainer.groups import Group, Sending
from trainer.program import ProgramError

Message: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""What one layer hands to the next, or the gradients of it (None where there is none)."""
Like: TypeAlias = tuple[bool, int]
"""Messages that look alike: of held-out samples or not, and how many samples."""
Arrival: TypeAlias = tuple[Kind, int]
"""FORWARD: the stage's input of that micro-batch is here; BACKWARD: the gradient of its output."""

MAX_TENSORS = 16
MAX_DIMENSIONS = 8
_HEADER_TAG = 0
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Links:
    """The neighbours of one stage; ``None`` where there is none."""

    def __init__(
        self,
        world: Group | None,
        previous: int | None,
        following: int | None,
        device: Device = CPU,
    ) -> None:
        self._device = device
        self._inbox = _Inbox()
        self._receivers: list[_Receiver] = []
        self._senders: dict[Kind, _Sender] = {}
        ways = ((Kind.FORWARD, previous, following), (Kind.BACKWARD, following, previous))
        for kind, source, target in ways:
            if world and source is not None:
                self._receivers.append(_Receiver(kind, world, source, self._inbox, device))
            if world and target is not None:
                self._senders[kind] = _Sender(kind, world, target, device)

    def expect(self, sizes: Sequence[int]) -> None:
        """Receive the messages of one mini-batch, whose micro-batches have ``sizes`` samples."""
        for receiver in self._receivers:
            receiver.expected.put([(m, (False, size)) for m, size in enumerate(sizes)])

    def expect_held_out(self, sizes: Sequence[int], first: int) -> None:
        """Receive inputs of an evaluation's micro-batches, the next of which is ``first``."""
        for receiver in self._receivers:
            if receiver.kind is Kind.FORWARD:
                receiver.expected.put([(m, (True, size)) for m, size in enumerate(sizes, first)])

    def arrivals(self) -> list[Arrival]:
        """What has come since the last call."""
        return self._inbox.fresh()

    def wait(self) -> None:
        """Until there is an arrival. Raises PeerLostError."""
        self._inbox.wait()

    def take_held_out(self, micro_batch: int) -> Message:
        """Wait for an evaluation's input. Raises PeerLostError."""
        return self._placed(self._inbox.wait_for((Kind.FORWARD, micro_batch)))

    def take(self, kind: Kind, micro_batch: int) -> Message:
        """An arrived message, on the device."""
        return self._placed(self._inbox.take((kind, micro_batch)))

    def send(
        self, kind: Kind, micro_batch: int, size: int, message: Message, *, held_out: bool = False
    ) -> None:
        """Send to the next stage (FORWARD) or the one before (BACKWARD).

        Waits only for a send four messages back. Raises PeerLostError; ProgramError when the
        message is not like the others of its size.
        """
        self._senders[kind].send(micro_batch, (held_out, size), message)

    def settle(self) -> None:
        """Wait until all that was sent is out."""
        for sender in self._senders.values():
            sender.settle()

    def _placed(self, message: Message) -> Message:
        if isinstance(message, Tensor):
            return self._device.place(message)
        return tuple(None if tensor is None else self._device.place(tensor) for tensor in message)


def tensors_in(value: Any) -> list[Tensor]:
    """Those in what a layer takes or gives."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, Iterable) else []


def in_a_tuple(message: Message) -> tuple[Tensor | None, ...]:
    """A tensor by itself is a tuple of one."""
    return (message,) if isinstance(message, Tensor) else message


class _Inbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[Arrival, Message] = {}
        self._fresh: list[Arrival] = []
        self._error: BaseException | None = None

    def put(self, arrival: Arrival, message: Message) -> None:
        with self._changed:
            self._messages[arrival] = message
            self._fresh.append(arrival)
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def fresh(self) -> list[Arrival]:
        with self._changed:
            self._raise_error()
            fresh, self._fresh = self._fresh, []
            return fresh

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._error)
            self._raise_error()

    def wait_for(self, arrival: Arrival) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: arrival in self._messages or self._error)
            self._raise_error()
            self._fresh.remove(arrival)
            return self._messages.pop(arrival)

    def take(self, arrival: Arrival) -> Message:
        with self._changed:
            return self._messages.pop(arrival)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _Receiver(threading.Thread):
    """Receives what is expected from ``source``, in order."""

    def __init__(
        self, kind: Kind, world: Group, source: int, inbox: _Inbox, device: Device
    ) -> None:
        super().__init__(name=f"receive-{kind}-{source}", daemon=True)
        self.expected: queue.SimpleQueue[Sequence[tuple[int, Like]]] = queue.SimpleQueue()
        self.kind = kind
        self._world = world
        self._source = source
        self._inbox = inbox
        self._device = device
        self._layouts: dict[Like, _Layout] = {}
        self.start()

    def run(self) -> None:
        try:
            self._device.enter()
            while True:
                for micro_batch, like in self.expected.get():
                    message = self._receive(micro_batch, like)
                    self._inbox.put((self.kind, micro_batch), message)
        except BaseException as error:
            self._inbox.fail(error)

    def _receive(self, micro_batch: int, like: Like) -> Message:
        if like not in self._layouts:
            header = torch.empty(_Layout.header_length(), dtype=torch.int64)
            self._world.receive(header, self._source, _HEADER_TAG)
            self._layouts[like] = _Layout.from_header(header)
        message = self._layouts[like].empty(self._device)
        for tag, tensor in _tagged(micro_batch, message):
            self._world.receive(tensor, self._source, tag)
        return message


class _Sender:
    """Sends to ``target``; keeps each tensor until it is out."""

    def __init__(self, kind: Kind, world: Group, target: int, device: Device) -> None:
        self._kind = kind
        self._world = world
        self._target = target
        self._device = device
        self._layouts: dict[Like, _Layout] = {}
        self._outstanding: deque[list[Sending]] = deque()

    def send(self, micro_batch: int, like: Like, message: Message) -> None:
        layout = _Layout.of(message)
        if like not in self._layouts:
            self._layouts[like] = layout
            self._world.send(layout.to_header(), self._target, _HEADER_TAG).wait()
        elif layout != (agreed := self._layouts[like]):
            what = "the output" if self._kind is Kind.FORWARD else "the gradient of the input"
            raise ProgramError(
                f"{what} of a stage changed from {agreed} to {layout}: micro-batches of one size "
                "must be alike"
            )
        tagged = _tagged(micro_batch, message)
        fetched = self._device.fetch([tensor.detach().contiguous() for _, tensor in tagged])
        sending = [
            self._world.send(tensor, self._target, tag)
            for (tag, _), tensor in zip(tagged, fetched, strict=True)
        ]
        self._outstanding.append(sending)
        if len(self._outstanding) > OUTSTANDING:
            self._finish_oldest()

    def settle(self) -> None:
        while self._outstanding:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for sending in self._outstanding.popleft():
            sending.wait()


def _tagged(micro_batch: int, message: Message) -> list[tuple[int, Tensor]]:
    """The tensors of ``message`` that travel. Source and target tell the kind apart."""
    tensors = in_a_tuple(message)
    first = _HEADER_TAG + 1 + micro_batch * MAX_TENSORS
    return [(first + i, t) for i, t in enumerate(tensors) if t is not None and t.numel()]


@dataclass(frozen=True)
class _Layout:
    """What a message looks like: dtype and shape per tensor, None for none."""

    tensors: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]
    is_bare: bool
    """One tensor by itself, not a tuple."""

    @classmethod
    def of(cls, message: Message) -> "_Layout":
        is_bare = isinstance(message, Tensor)
        tensors = (message,) if isinstance(message, Tensor) else message
        return cls(
            tuple(None if t is None else (t.dtype, tuple(t.shape)) for t in tensors), is_bare
        )

    def __str__(self) -> str:
        each = (f"{spec[0]} {spec[1]}".removeprefix("torch.") if spec else "nothing"
                for spec in self.tensors)  # fmt: skip
        return ", ".join(each) or "nothing"

    def empty(self, device: Device) -> Message:
        """Room on the host for such a message."""
        made = tuple(spec and device.room(spec[1], spec[0]) for spec in self.tensors)
        if self.is_bare:
            assert made[0] is not None
            return made[0]
        return made

    # The header: is_bare, count, then per tensor dtype code (-1: none), dimensions, sizes.

    @staticmethod
    def header_length() -> int:
        return 2 + MAX_TENSORS * (2 + MAX_DIMENSIONS)

    def to_header(self) -> Tensor:
        if len(self.tensors) > MAX_TENSORS:
            raise ProgramError(f"a stage hands on {len(self.tensors)} tensors, not ≤ {MAX_TENSORS}")
        header = torch.zeros(self.header_length(), dtype=torch.int64)
        header[0], header[1] = self.is_bare, len(self.tensors)
        for spec, row in zip(self.tensors, header[2:].view(MAX_TENSORS, -1), strict=False):
            if spec is None:
                row[0] = -1
                continue
            dtype, shape = spec
            if dtype not in _DTYPES or len(shape) > MAX_DIMENSIONS:
                raise ProgramError(f"a stage hands on a {self}, which cannot be sent")
            row[0], row[1] = _DTYPES.index(dtype), len(shape)
            row[2 : 2 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
        return header

    @classmethod
    def from_header(cls, header: Tensor) -> "_Layout":
        is_bare, count, *rest = header.tolist()
        width = 2 + MAX_DIMENSIONS
        rows = [rest[i * width : (i + 1) * width] for i in range(count)]
        specs = (None if c < 0 else (_DTYPES[c], tuple(sizes[:n])) for c, n, *sizes in rows)
        return cls(tuple(specs), bool(is_bare))
