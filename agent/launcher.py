"""Starts, watches and ends trainers through a zygote (:mod:`trainer.zygote`); reads what they say.

Knows no controller, no orders and no files but the logs it is told to make: the daemon and
``varuna try`` stand on the same :class:`Zygote`. All of it lives in one event loop.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import ValidationError

from trainer.contract import forks
from trainer.contract.progress import LINE, ORDER, Line, Order
from trainer.contract.spec import Program, RunSpec

_LONGEST_LINE = 16 << 20
"""Bytes; a trainer that says more in a line is out of its mind."""
_LAST_LINES_SECONDS = 2.0
"""How long a dead trainer's socket may stay open: an orphan of it may hold it for a moment."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The zygote's: importing numpy or torch must not start threads. ``cuda:N`` counts as nvidia-smi
does, and who asks whether there is a GPU must not touch CUDA, or no fork could use it.
"""


class LaunchError(Exception):
    """A trainer, the store or the zygote itself could not be started."""


class BrokenProgramError(LaunchError):
    """The program cannot be loaded, by nobody on this machine."""


@dataclass(frozen=True)
class Exit:
    """The end of a trainer's process. Exactly one of ``code`` and ``signal`` is set."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        return f"code {self.code}" if self.signal is None else f"signal {self.signal}"


class Trainer:
    """A trainer that was started: its lines and its end as one stream, orders, the kill."""

    def __init__(
        self,
        zygote: "Zygote",
        process: "_Process",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        """Its process and its session."""
        self.zygote = zygote
        """That it was forked from."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._events: asyncio.Queue[Line | Exit] = asyncio.Queue()
        self._has_spoken = False

    async def events(self) -> AsyncIterator[Line | Exit]:
        """All that it says, in order, and at last its :class:`Exit`. To be read once."""
        while not isinstance(event := await self._events.get(), Exit):
            yield event
        yield event

    def begin(self, begin: forks.Begin) -> None:
        """Tell one that stands by what to do."""
        self._writer.write(forks.framed(begin))

    @property
    def is_gone(self) -> bool:
        """Whether the process is."""
        return self._process.gone.done()

    def send(self, order: Order) -> None:
        """Pass an order; it is lost when the trainer is gone, as its exit will tell."""
        if not self._writer.is_closing():
            self._writer.write(ORDER.dump_json(order) + b"\n")

    def dump(self) -> None:
        """Have it write all its stacks into its log. Only for one that has said something: a fork
        that is not a trainer yet would die of the signal.
        """
        if self._has_spoken and not self._process.gone.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR2)

    async def kill(self) -> None:
        """SIGKILL its whole session; :meth:`ended` tells when it is gone."""
        await self.zygote.kill(self._process)

    async def ended(self) -> Exit:
        """Wait until the process is gone."""
        return await asyncio.shield(self._process.gone)

    async def listen(self) -> None:
        """Take in what it says until its end; the zygote runs this, once.

        A line that cannot be understood kills the trainer.
        """
        try:
            while text := await self._next_line():
                self._events.put_nowait(LINE.validate_json(text))
                self._has_spoken = True
        except ValidationError:
            await self.kill()
        finally:
            self._writer.close()
        self._events.put_nowait(await self.ended())

    async def _next_line(self) -> bytes:
        """The next whole line; empty when nothing will come any more."""
        reading = asyncio.ensure_future(self._reader.readline())
        try:
            waited: list[asyncio.Future[Any]] = [reading, self._process.gone]
            await asyncio.wait(waited, return_when=FIRST_COMPLETED)
            text = await asyncio.wait_for(reading, _LAST_LINES_SECONDS)
        except (OSError, TimeoutError):  # reset by its death; held open by what it left behind
            return b""
        except ValueError:  # longer than any honest line
            await self.kill()
            return b""
        return text if text.endswith(b"\n") else b""


class Command:
    """A shell command that was started: its end, and the kill."""

    def __init__(self, zygote: "Zygote", process: "_Process") -> None:
        self.pid = process.pid
        """Its process and its session."""
        self._zygote = zygote
        self._process = process

    async def ended(self) -> Exit:
        """Wait until it is gone, and all that it started."""
        return await asyncio.shield(self._process.gone)

    async def kill(self) -> None:
        """SIGKILL its whole session; it is gone on return."""
        await self._zygote.kill(self._process)
        await self.ended()


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


@dataclass(frozen=True)
class _Process:
    id: str
    pid: int
    gone: "asyncio.Future[Exit]"


class Zygote:
    """The owner's end of a zygote. It and all that it forked end with :meth:`close`, or with us."""

    def __init__(
        self,
        owner: socket.socket,
        process: subprocess.Popen[bytes] | None,
        kill: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``kill`` ends one that does not hear yet."""
        self.lost = asyncio.Event()
        """The zygote is gone, and with it all trainers."""
        self._owner = owner
        self._process = process
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[forks.Ready] = self._loop.create_future()
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._gone: dict[str, asyncio.Future[Exit]] = {}
        self._numbers = itertools.count(1)
        self._listening: set[asyncio.Task[None]] = set()
        self._closing = False
        self._keeping: asyncio.Task[None] | None = None
        owner.setblocking(False)
        self._loop.add_reader(owner, self._hear)

    @classmethod
    async def start(cls, *, entry: str | None = None, path: Path | None = None) -> Self:
        """Start a zygote and wait for its imports, seconds. Raises LaunchError.

        ``entry`` (``MODULE:FUNCTION``, with ``path`` on sys.path) replaces the trainer in tests.
        """
        command = [sys.executable, "-I", "-u", "-m", "trainer.zygote"]
        command += ["--entry", entry] if entry else []
        command += ["--path", str(path)] if path else []
        ours, theirs = forks.pair()
        with theirs:
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # our own standard output is for data
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for us to answer
            )
        return await cls(ours, process)._once_ready()

    @classmethod
    async def adopt(cls, descriptor: int) -> Self:
        """Own the zygote at the other end of ``descriptor``. Raises LaunchError."""
        try:
            owner = socket.socket(fileno=descriptor)
        except OSError as error:
            raise LaunchError(
                f"descriptor {descriptor} is no zygote's: {error.strerror}"
            ) from error
        owner.set_inheritable(False)  # nobody else may keep it alive
        return await cls(owner, None)._once_ready()

    async def _once_ready(self) -> Self:
        try:
            await asyncio.shield(self._ready)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def pid(self) -> int:
        """Its process."""
        return self._ready.result().pid

    @property
    def torch_version(self) -> str:
        """The version of torch that it imported."""
        return self._ready.result().torch_version

    async def loading(self, program: Program, log_path: Path) -> "Zygote":
        """A zygote forked from this one that has loaded ``program``, and prints into ``log_path``.

        Raises BrokenProgramError, LaunchError: trainers should not be forked from such a one.
        """
        ours, theirs = forks.pair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                order = forks.StartZygote(
                    id=self._new_id("zygote"), program=program, log_path=str(log_path)
                )
                process = await self._start(order, theirs)
            undo.pop_all()
        return await Zygote(ours, None, partial(self.kill, process))._once_ready()

    async def start_trainer(self, spec: RunSpec, log_path: Path, threads: int = 1) -> Trainer:
        """Fork a trainer; its output is appended to ``log_path``. Raises LaunchError."""
        return await self._fork(forks.Begin(spec=spec, log_path=str(log_path), threads=threads))

    async def stand_by(self) -> Trainer:
        """Fork a trainer that waits for :meth:`Trainer.begin`. Raises LaunchError."""
        return await self._fork(None)

    async def _fork(self, begin: forks.Begin | None) -> Trainer:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                order = forks.StartTrainer(id=self._new_id("trainer"), begin=begin)
                process = await self._start(order, theirs)
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LONGEST_LINE)
            undo.pop_all()
        trainer = Trainer(self, process, reader, writer)
        listening = asyncio.create_task(trainer.listen())
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)
        return trainer

    async def start_command(self, command: str, folder: Path, log_path: Path) -> "Command":
        """Run a shell command in ``folder``; its output is appended to ``log_path``. Raises
        LaunchError, OSError.
        """
        order = forks.StartCommand(id=self._new_id("command"), command=command, folder=str(folder))
        with log_path.open("ab") as log:
            return Command(self, await self._start(order, log))

    async def start_store(self, host: str) -> int:
        """Serve a rendezvous store on ``host`` for as long as the zygote lives; its port.

        The port is bound here and handed over, and bound again should the store die. Raises
        LaunchError.
        """
        port, self.store = await self._serve_store(host, 0)
        self._keeping = asyncio.create_task(self._keep_store(host, port))
        return port

    async def _serve_store(self, host: str, port: int) -> tuple[int, _Process]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise LaunchError(f"cannot listen on {host}: {error.strerror}") from error
        with listening:
            process = await self._start(forks.StartStore(id=self._new_id("store")), listening)
            bound: int = listening.getsockname()[1]
            return bound, process

    async def _keep_store(self, host: str, port: int) -> None:
        while True:
            await asyncio.shield(self.store.gone)
            if self._closing or self.lost.is_set():
                return
            with contextlib.suppress(LaunchError):
                _, self.store = await self._serve_store(host, port)
            await asyncio.sleep(0.1)

    async def kill(self, process: _Process) -> None:
        """SIGKILL the whole session of ``process``."""
        await self._send(forks.Kill(id=process.id))

    async def close(self) -> None:
        """End the zygote and all that it forked; they are gone on return."""
        self._closing = True
        if self._keeping:
            self._keeping.cancel()
        if not self._ready.done():  # it imports, has forked nothing, and would hear us late
            self._ready.cancel()
            if self._process:
                self._process.kill()
            if self._kill:
                await self._kill()
        if not self.lost.is_set():
            self._owner.shutdown(socket.SHUT_WR)
            await self.lost.wait()
        self._owner.close()
        await asyncio.gather(*self._listening)
        if self._process:
            await asyncio.to_thread(self._process.wait)

    def _new_id(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    async def _start(self, order: forks.Start, descriptor: "_HasDescriptor") -> _Process:
        self._starting[order.id] = started = self._loop.create_future()
        self._gone[order.id] = gone = self._loop.create_future()
        try:
            await self._send(order, descriptor.fileno())
            return _Process(order.id, await started, gone)
        except ValueError as error:
            raise LaunchError(str(error)) from error
        except asyncio.CancelledError:
            await self._send(forks.Kill(id=order.id))
            raise
        finally:
            del self._starting[order.id]

    async def _send(self, message: forks.Request, descriptor: int | None = None) -> None:
        while not self.lost.is_set():
            try:
                return forks.send(self._owner, message, descriptor)
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError:
                break
        if message.kind != "kill":
            raise LaunchError("the zygote is gone")

    def _hear(self) -> None:
        """Take what the zygote says, until nothing more is there."""
        while True:
            try:
                received = forks.receive(self._owner)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                return self._lose()
            self._take(forks.ANSWER.validate_json(received[0]))

    def _take(self, answer: forks.Answer) -> None:
        match answer:
            case forks.Ready():
                if not self._ready.done():
                    self._ready.set_result(answer)
            case forks.Unfit():
                if not self._ready.done():
                    error = BrokenProgramError if answer.is_broken else LaunchError
                    self._ready.set_exception(error(answer.message))
            case forks.Started():
                if started := self._starting.get(answer.id):
                    started.set_result(answer.pid)
            case forks.Refused():
                self._gone.pop(answer.id, None)
                if started := self._starting.get(answer.id):
                    started.set_exception(LaunchError(answer.message))
            case forks.Exited():
                if gone := self._gone.pop(answer.id, None):
                    gone.set_result(Exit(answer.code, answer.signal))

    def _lose(self) -> None:
        """The zygote is gone; the kernel has killed what it forked."""
        self._loop.remove_reader(self._owner)
        self.lost.set()
        error = LaunchError("the zygote ended; its output above says why")
        unanswered: list[asyncio.Future[Any]] = [self._ready, *self._starting.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(error)
        for gone in self._gone.values():
            gone.set_result(Exit(signal=signal.SIGKILL))
        self._gone.clear()
