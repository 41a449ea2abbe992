"""A trainer that computes nothing: it does what ``spec.program.args`` says. Run in a zygote's fork.

print           text for standard output
leave_behind    a file for the pids of children that will not go by themselves
steps           how many steps it says it committed
launched        say that the first one is under way
end             {"code": n}, {"signal": n}, {"raise": text}; without it: print each order, say
                halted, until told to leave
"""

import os
import signal
import socket
import sys
import time
from typing import Any

from trainer.contract.progress import (
    LINE,
    ORDER,
    ExitCode,
    Halted,
    Leave,
    Line,
    Phase,
    PhaseBegun,
    StepCommitted,
)
from trainer.contract.spec import RunSpec


def run(spec: RunSpec, control: socket.socket) -> int:
    args: dict[str, Any] = dict(spec.program.args)
    signal.signal(signal.SIGUSR2, lambda *_: print("all stacks"))
    say(control, PhaseBegun(phase=Phase.BOOT))
    sys.stdout.write(args.get("print", ""))
    for _ in range(args.get("flood", 0)):
        sys.stdout.write("x" * (1 << 20))
    if args.get("source"):
        with open(spec.program.source) as file:
            print(file.read())
    if path := args.get("leave_behind"):
        leave_behind(path)
    if args.get("launched"):
        say(control, PhaseBegun(phase=Phase.FIRST_STEP))
    for step in range(1, args.get("steps", 0) + 1):
        say(control, committed(step))
    match args.get("end"):
        case {"code": code}:
            return int(code)
        case {"signal": number}:
            os.kill(os.getpid(), number)
        case {"raise": text}:
            raise RuntimeError(text)
    return obey(control)


def say(control: socket.socket, line: Line) -> None:
    control.sendall(LINE.dump_json(line) + b"\n")


def obey(control: socket.socket) -> int:
    for text in control.makefile():
        if isinstance(ORDER.validate_json(text), Leave):
            break
        print(text, end="")
        say(control, Halted(applied=1, prepared=1, cause="ordered"))
    return ExitCode.LEFT


def committed(step: int) -> StepCommitted:
    return StepCommitted(
        step=step, loss=1 / step, grad_norm=1.0, samples=8, sample_ids_hash="00000000", seconds=0.1
    )


def leave_behind(path: str) -> None:
    """A worker that ignores SIGTERM, its own child, and a daemon in a session of its own."""
    worker = fork_forever(children=1)
    daemon = fork_daemon()
    with open(path + ".tmp", "w") as file:
        file.write(f"{worker} {daemon}")
    os.rename(path + ".tmp", path)


def fork_forever(children: int) -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if children:
            fork_forever(children - 1)
        while True:
            time.sleep(60)
    return pid


def fork_daemon() -> int:
    read, write = os.pipe()
    if (middle := os.fork()) == 0:
        os.setsid()
        os.write(write, str(fork_forever(children=0)).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    return int(os.read(read, 20))
