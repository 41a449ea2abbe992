"""What a fresh child of a zygote becomes: a trainer, the store, or a command.

It begins as a copy of the zygote: all descriptors but its own are closed, signals are as in any
process, and what it draws at random is its own.
"""

import contextlib
import io
import os
import random
import signal
import socket
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
import torch.distributed

from trainer.contract import forks
from trainer.contract.progress import ExitCode
from trainer.contract.spec import RunSpec
from trainer.processes import be_subreaper, open_descriptors

Entry = Callable[[RunSpec, socket.socket], int]


@dataclass(frozen=True)
class Task:
    """What a process is to be; it owns the descriptors."""

    order: forks.Start
    descriptor: int
    log: int | None = None


def be(task: Task, entry: Entry) -> int:
    """Be a trainer or the store in this fresh child; the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close_all_but(task)
    match task.order:
        case forks.StartTrainer():
            return _train(task.order, task.descriptor, entry)
        case forks.StartStore():
            return _serve_store(task.descriptor)
        case forks.StartCommand():
            return _execute(task.order, task.descriptor)
    raise ValueError(f"a child cannot be {task.order.kind}")


def _close_all_but(task: Task) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if task.log is not None:
        write_to(task.log)
    for descriptor in open_descriptors():
        if descriptor > 2 and descriptor != task.descriptor:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _train(order: forks.StartTrainer, descriptor: int, entry: Entry) -> int:
    be_subreaper()  # keeps its orphans apart from other trainers' until its end
    for stream in (sys.stdout, sys.stderr):
        # A log takes any character, whatever the locale, and whole lines at once.
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    code: int = ExitCode.INTERNAL
    try:
        with socket.socket(fileno=descriptor) as control:
            begin = order.begin or _stand_by(control)
            if begin is None:
                return ExitCode.LEFT
            _seed(begin.spec)
            torch.set_num_threads(begin.threads)
            code = entry(begin.spec, control)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else ExitCode.INTERNAL
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _stand_by(control: socket.socket) -> forks.Begin | None:
    """Wait to be told what to do; None: the owner is gone."""
    begin = forks.read_begin(control)
    if begin:
        write_to(log := opened(begin.log_path))
        os.close(log)
    return begin


def _seed(spec: RunSpec) -> None:
    """Two children of one zygote must not draw the same numbers."""
    seed = zlib.crc32(f"{spec.training.seed}/{spec.generation}/{spec.rank}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _serve_store(descriptor: int) -> int:
    with socket.socket(fileno=descriptor) as listening:
        host, port = listening.getsockname()[:2]
        listening.detach()
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # torch's stubs miss it
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    while store:
        signal.pause()
    return 0


def _execute(order: forks.StartCommand, output: int) -> int:
    write_to(output)
    os.close(output)
    tools = os.path.dirname(sys.executable)
    path = os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    try:
        os.chdir(order.folder)
        os.execve("/bin/sh", ["sh", "-c", order.command], os.environ | {"PATH": path})
    except OSError as error:
        print(f"cannot run it: {error}", file=sys.stderr, flush=True)
    return ExitCode.INTERNAL


def opened(log_path: str) -> int:
    """A descriptor that appends there, and that a program which is run does not inherit."""
    return os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def write_to(log: int) -> None:
    """Have what this process prints go there."""
    os.dup2(log, 1)
    os.dup2(log, 2)
