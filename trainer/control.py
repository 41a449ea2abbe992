"""The control thread: it always answers, whatever the main thread waits for.

It writes what the trainer says (so that a slow agent never blocks a step), hears orders, and
watches the sockets of the process groups: when a peer dies, the kernel tells each survivor at once
and directly, so each names the same rank within a millisecond.

A *halt* shuts down every connected socket of the groups (never a listening one: gloo would abort
the process) and aborts NCCL, which ends any wait of the main thread; it then stands still with its
state intact and does what it is ordered, until it is told to leave, its limbo runs out, or the
agent is gone.
The reading side goes at once, which no peer can see; the writing side a little later, so that
errors travel on but nobody takes one who halted for the one who died.
"""

import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from trainer.contract.progress import (
    ORDER,
    Ballot,
    ExitCode,
    Forward,
    Halt,
    Halted,
    Leave,
    Line,
    Phase,
    PhaseBegun,
    Save,
    SaveEvery,
    SaveNow,
    Stay,
    Stop,
)

COME_BACK_SECONDS = 10.0
"""How long the main thread may take to stand still once halted."""
_HANG_UP_SECONDS = 0.5
"""How long after a halt the peers are hung up on: longer than the kernel takes to close all sockets
of a killed process on a busy machine.
"""
_DIRECT_SIGHT_SECONDS = 0.2
_LAST_WORDS_SECONDS = 5.0


class HaltingError(Exception):
    """The trainer was halted: the main thread is to stand still."""


@dataclass
class Standing:
    """How far this rank's state is. The main thread writes it."""

    applied: int = 0
    """The last step whose optimizer step is done."""
    prepared: int = 0
    """The last step whose gradients are whole."""
    vote_step: int | None = None
    """The newest step whose vote this rank holds."""
    ballot: Ballot | None = None
    """That vote."""
    holds: tuple[int, ...] = ()
    """The layers in memory."""
    is_applying: bool = False
    """Inside of an optimizer step; what is left of it is torn."""


@dataclass(frozen=True)
class _Cause:
    text: str
    suspects: tuple[int, ...]


class Control:
    """One trainer's conversation with its agent, and its way to a standstill."""

    def __init__(
        self, connection: socket.socket, leave: Callable[[int], NoReturn] = os._exit
    ) -> None:
        self.standing = Standing()
        self.is_to_stop = threading.Event()
        """All ranks shall stop after a step: to be said in the next vote."""
        self.is_to_save = threading.Event()
        """All ranks shall save after a step; who says so in a vote clears it."""
        self.save_every: float | None = None
        """Seconds between saves, when that was told anew."""
        self._connection = connection
        self._connection.setblocking(False)
        self._leave = leave
        self._heard = bytearray()
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._is_flushed = threading.Condition(self._lock)
        self._peers: dict[int, tuple[socket.socket, int | None]] = {}
        self._abort: Callable[[], None] = lambda: None
        self._cause: _Cause | None = None
        self._is_halted = threading.Event()
        self._is_standing = False
        self._orders: queue.SimpleQueue[Halt | Stay | Forward | Save] = queue.SimpleQueue()
        """For the main thread when it stands still; a halt that came meanwhile among them."""
        self._hang_up_at = math.inf
        self._give_up_at = math.inf
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # --- for the main thread ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def say(self, line: Line) -> None:
        """Queue ``line`` for the agent; never blocks."""
        with self._lock:
            self._backlog += line.model_dump_json().encode() + b"\n"
        os.eventfd_write(self._wake, 1)

    def enter(self, phase: Phase) -> None:
        """Say that ``phase`` begins."""
        self.say(PhaseBegun(phase=phase))

    def watch(self, sockets: Mapping[socket.socket, int | None], abort: Callable[[], None]) -> None:
        """From now on the end of one of ``sockets`` halts the trainer; its rank is the suspect.

        ``abort``, which returns at once, ends those waits of the main thread that no socket ends.
        """
        self._abort = abort
        # All at once: from the first that is registered on, the control thread may go through them.
        self._peers = {connected.fileno(): (connected, rank) for connected, rank in sockets.items()}
        for descriptor in self._peers:
            self._epoll.register(descriptor, select.EPOLLRDHUP)

    def unwatch(self) -> None:
        """Peers may go from now on."""
        for descriptor in self._peers:
            with suppress(OSError):
                self._epoll.unregister(descriptor)

    def check(self) -> None:
        """Raise HaltingError when the trainer is halted."""
        if self._is_halted.is_set():
            raise HaltingError

    def halt(self, cause: str, suspects: tuple[int, ...] = ()) -> None:
        """End every wait on a peer. The first cause counts."""
        with self._lock:
            if self._cause is not None:
                return
            self._cause = _Cause(cause, suspects)
            self._hang_up_at = time.monotonic() + _HANG_UP_SECONDS
            if self._is_standing:
                self._orders.put(Halt())
            else:
                self._give_up_at = time.monotonic() + COME_BACK_SECONDS
        self._is_halted.set()
        self._shut_down(socket.SHUT_RD)
        self._abort()
        os.eventfd_write(self._wake, 1)

    def halt_after_error(self, cause: str, suspects: tuple[int, ...]) -> None:
        """Halt because a call that needs peers failed.

        What this thread's watch saw directly counts for more than whose call failed: give it time.
        """
        if not self._is_halted.wait(_DIRECT_SIGHT_SECONDS):
            self.halt(cause, suspects)

    def stand_still(self, limbo_seconds: float) -> Iterator[Forward | Save]:
        """Report and give what is ordered, until nothing has been for ``limbo_seconds``.

        Each order is to be carried out before the next is asked for. The control thread leaves.
        """
        with self._lock:
            self._is_standing = True
            self._give_up_at = math.inf
        if self._cause:
            self._report_halted(torn=self.standing.is_applying)
        self.enter(Phase.HALTED)
        with suppress(queue.Empty):
            while True:
                order = self._orders.get(timeout=limbo_seconds)
                if isinstance(order, Forward | Save):
                    yield order
                if self._cause and isinstance(order, Halt | Forward):
                    self._report_halted(torn=self.standing.is_applying)

    def flush(self) -> None:
        """Wait until all that was said is written, or the agent does not read."""
        with self._is_flushed:
            self._is_flushed.wait_for(lambda: not self._backlog, _LAST_WORDS_SECONDS)

    # --- the control thread -------------------------------------------------------------------

    def _run(self) -> None:
        connection = self._connection.fileno()
        while True:
            for descriptor, _ in self._epoll.poll(self._patience()):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif descriptor == connection:
                    self._hear()
                else:
                    self._lose(descriptor)
            self._write()
            now = time.monotonic()
            if now >= self._hang_up_at:
                self._hang_up_at = math.inf
                self._shut_down(socket.SHUT_RDWR)
            if now >= self._give_up_at:
                self._give_up_main_thread()

    def _patience(self) -> float | None:
        """Seconds until there is something to do that nobody asks for."""
        at = min(self._hang_up_at, self._give_up_at)
        return None if at == math.inf else max(0.0, at - time.monotonic())

    def _hear(self) -> None:
        try:
            received = self._connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:  # the agent is gone
            self._leave(ExitCode.LEFT)
        self._heard += received
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            match ORDER.validate_json(line):
                case Halt():
                    self.halt("ordered")
                case Leave():
                    self._leave(ExitCode.LEFT)
                case Stop():
                    self.is_to_stop.set()
                case SaveNow():
                    self.is_to_save.set()
                case SaveEvery() as every:
                    self.save_every = every.seconds
                case Stay() | Forward() | Save() as order:
                    self._orders.put(order)

    def _shut_down(self, how: int) -> None:
        for connected, _ in self._peers.values():
            with suppress(OSError):
                connected.shutdown(how)

    def _lose(self, descriptor: int) -> None:
        """A peer hung up: it died or ended, or halted a while ago."""
        with suppress(OSError):
            self._epoll.unregister(descriptor)
        rank = self._peers[descriptor][1]
        self.halt(
            "a peer hung up" if rank is None else f"rank {rank} hung up",
            () if rank is None else (rank,),
        )

    def _write(self) -> None:
        with self._lock:
            try:
                while self._backlog:
                    del self._backlog[: self._connection.send(self._backlog)]
            except BlockingIOError:
                pass
            except OSError:
                self._leave(ExitCode.LEFT)
            events = select.EPOLLIN | (select.EPOLLOUT if self._backlog else 0)
            self._epoll.modify(self._connection.fileno(), events)
            if not self._backlog:
                self._is_flushed.notify_all()

    def _give_up_main_thread(self) -> None:
        """It hangs somewhere that no socket ends: nobody can vouch for its state."""
        self._report_halted(torn=True)
        self._write()
        self._leave(ExitCode.PEER_LOST)

    def _report_halted(self, *, torn: bool) -> None:
        assert self._cause is not None
        standing = self.standing
        self.say(
            Halted(
                applied=standing.applied,
                prepared=standing.prepared,
                vote_step=standing.vote_step,
                ballot=standing.ballot,
                holds=standing.holds,
                torn=torn,
                cause=self._cause.text,
                suspects=self._cause.suspects,
            )
        )
