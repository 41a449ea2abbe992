"""The warm process that trainers and the store are forked from: parent, reaper and subreaper.

It has imported torch and all that a trainer needs, started no thread and computed nothing, so a
fork of it is a trainer in milliseconds. It knows no agent, only an owner at the other end of a
socket that tells it what to fork (:mod:`trainer.contract.forks`) and hears what became of it.

    owner ==socket== zygote --+-- trainer   (own session, subreaper of its own orphans)
                              +-- store
                              +-- zygote ==socket== another owner
                              +-- zygote that has loaded a program ==socket== the same owner

The chain of death: when the owner goes, the zygote kills all that it forked; when the zygote goes,
the kernel does (parent-death signal). What a dead trainer leaves behind comes to the zygote, since
both are subreapers: a child that it did not fork is an orphan, and is killed. So data-loader
workers, daemons that forked twice and those that ignore SIGTERM end with their trainer.
"""

import argparse
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator

import safetensors.torch  # noqa: F401  (for the trainers)
import torch
import torch._dynamo  # the first optimizer pulls it in, which takes seconds
import torch.distributed
import torch.optim

from trainer import warm
from trainer.contract import forks
from trainer.contract.progress import ExitCode
from trainer.contract.spec import Program
from trainer.forked import Entry, Task, be, opened, write_to
from trainer.processes import (
    be_subreaper,
    children_of,
    die_with,
    kill,
    kill_session,
    next_dead,
    open_descriptors,
)
from trainer.program import ProgramError

_LAST_WORDS_SECONDS = 10.0
"""How long the killed may take to be gone after the owner went."""
_END_BY_ITSELF_SECONDS = 2.0
"""Of that, what a zygote for a program gets to end its own trainers."""


def main() -> None:
    """Serve the owner at ``--fd``; in each child that is forked on the way, be that child."""
    parser = argparse.ArgumentParser(prog="trainer.zygote", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the owner's socket")
    parser.add_argument("--entry", default="trainer.main:run", help="MODULE:FUNCTION of a trainer")
    parser.add_argument("--path", help="a folder to append to sys.path before the entry's import")
    arguments = parser.parse_args()
    if arguments.path:
        sys.path.append(arguments.path)
    entry = _entry(arguments.entry)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.exit(f"the zygote has {threads} threads after its imports; a fork of it could hang")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a service's end reach the owner
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    task: Task | None = Task(forks.StartZygote(id="first"), arguments.fd)
    while task and isinstance(task.order, forks.StartZygote):
        if task.order.program:
            _load_before(task.order.program, task)
        task = _serve(task.descriptor)
    if task:  # the loop was left in a child
        os._exit(be(task, entry))


def _entry(name: str) -> Entry:
    module, _, function = name.rpartition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def _load_before(program: Program, task: Task) -> None:
    """Load the program of a zygote's own; end when trainers could not be forked from what it made.

    Threads are not there in a fork, and neither are files: a trainer closes what is not its own.
    """
    if task.log is not None:
        write_to(task.log)
        os.close(task.log)
    before = open_descriptors()
    is_broken = False
    try:
        warm.keep(program)
        unfit = _unfit(before)
    except ProgramError as error:
        unfit, is_broken = str(error), True
    if unfit:
        with socket.socket(fileno=task.descriptor) as owner, contextlib.suppress(OSError):
            forks.send(owner, forks.Unfit(message=unfit, is_broken=is_broken))
        os._exit(ExitCode.PROGRAM_ERROR)
    gc.collect()
    gc.freeze()


def _unfit(before: set[int]) -> str:
    """Why this process should not be forked; empty when nothing speaks against it."""
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"it starts threads when it is imported or its dataset is built ({threads - 1})"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "it touches CUDA when it is imported or its dataset is built"
    if any(children_of(os.getpid())):
        return "it starts processes when it is imported or its dataset is built"
    if open_descriptors() - before:
        return "it keeps files open that it opens when it is imported or its dataset is built"
    return ""


def _serve(descriptor: int) -> Task | None:
    """Be a zygote until the owner is gone and with it all that was forked: then None.

    In a fresh child: what it is to be, with all that was the zygote's closed.
    """
    be_subreaper()
    with socket.socket(fileno=descriptor) as owner, _woken_by_deaths() as wake:
        return _Zygote(owner, wake).serve()


@contextlib.contextmanager
def _woken_by_deaths() -> Iterator[int]:
    """A descriptor that becomes readable whenever a child has died."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(read)
        os.close(write)


class _Zygote:
    def __init__(self, owner: socket.socket, wake: int) -> None:
        self._owner = owner
        self._wake = wake
        self._forked: dict[int, forks.Start] = {}
        self._owner_is_there = True

    def serve(self) -> Task | None:
        self._tell(forks.Ready(pid=os.getpid(), torch_version=torch.__version__))
        with selectors.PollSelector() as selector:  # epoll would be shared with the children
            selector.register(self._owner, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while self._owner_is_there:
                for key, _ in selector.select():
                    if key.fileobj is self._owner:
                        if task := self._hear():
                            return task
                    else:
                        os.read(self._wake, 4096)
                self._reap()
        self._end_all()
        return None

    def _hear(self) -> Task | None:
        """Carry out one request; in the child that it makes, return what the child is to be."""
        try:
            received = forks.receive(self._owner)
        except ConnectionError:
            received = None
        if received is None:
            self._owner_is_there = False
            return None
        text, descriptor = received
        request = forks.REQUEST.validate_json(text)
        if isinstance(request, forks.Kill):
            self._kill(request.id)
            return None
        if descriptor is None:
            raise ValueError(f"{request.kind} came without its descriptor")
        return self._fork(request, descriptor)

    def _fork(self, order: forks.Start, descriptor: int) -> Task | None:
        zygote, log = os.getpid(), None
        answer: forks.Started | forks.Refused
        try:
            log = _open_log(order)
            pid = os.fork()
        except OSError as error:
            answer = forks.Refused(id=order.id, message=f"cannot start it: {error}")
        else:
            if pid == 0:
                if not _is_for_another(order):
                    die_with(zygote)
                os.setsid()
                return Task(order, descriptor, log)
            self._forked[pid] = order
            answer = forks.Started(id=order.id, pid=pid)
        os.close(descriptor)
        if log is not None:
            os.close(log)
        self._tell(answer)
        return None

    def _kill(self, id_: str) -> None:
        for pid, order in self._forked.items():
            if order.id == id_:
                kill_session(pid)

    def _reap(self) -> None:
        """Collect the dead, end what they left behind, then tell the owner."""
        exits, someone_died = [], False
        while (dead := next_dead()) is not None:
            if dead.si_pid in self._forked:
                kill_session(dead.si_pid)  # before its number is free again
            os.waitpid(dead.si_pid, 0)
            if order := self._forked.pop(dead.si_pid, None):
                by_itself = dead.si_code == os.CLD_EXITED
                code, number = (dead.si_status, None) if by_itself else (None, dead.si_status)
                exits.append(forks.Exited(id=order.id, code=code, signal=number))
            someone_died = True
        if someone_died:
            self._end_orphans()
        for exit_ in exits:
            self._tell(exit_)

    def _end_orphans(self) -> bool:
        """Kill every child that was not forked here; whether there was one.

        Its own children come here when it dies, and that death wakes us again.
        """
        orphans = [pid for pid in children_of(os.getpid()) if pid not in self._forked]
        for pid in orphans:
            kill(pid)
        return bool(orphans)

    def _end_all(self) -> None:
        """The owner is gone: end all but the zygotes that have owners of their own.

        One for a program sees for itself that the owner is gone, unless it is still loading.
        """
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < _LAST_WORDS_SECONDS:
            mine = {pid: o for pid, o in self._forked.items() if not _is_for_another(o)}
            for pid, order in mine.items():
                if not isinstance(order, forks.StartZygote) or seconds > _END_BY_ITSELF_SECONDS:
                    kill_session(pid)
            if not self._end_orphans() and not mine:
                return
            time.sleep(0.005)
            self._reap()

    def _tell(self, answer: forks.Answer) -> None:
        with contextlib.suppress(OSError):  # an owner that is gone is seen as the end of the socket
            forks.send(self._owner, answer)


def _is_for_another(order: forks.Start) -> bool:
    return isinstance(order, forks.StartZygote) and order.program is None


def _open_log(order: forks.Start) -> int | None:
    match order:
        case (
            forks.StartTrainer(begin=forks.Begin(log_path=path)) | forks.StartZygote(log_path=path)
        ):
            return opened(path) if path else None
    return None


if __name__ == "__main__":
    main()
