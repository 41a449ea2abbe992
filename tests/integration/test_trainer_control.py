"""The control thread by itself: it answers while the main thread hangs, and never blocks it."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.waiting import until
from trainer.contract.progress import (
    LINE,
    ORDER,
    ExitCode,
    Finished,
    Forward,
    Halt,
    Halted,
    Leave,
    Order,
    Phase,
    PhaseBegun,
    Save,
    SaveNow,
    Stay,
    Stop,
)
from trainer.control import Control, HaltingError

pytestmark = [
    pytest.mark.integration,
    # SystemExit is how the control thread leaves here
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

HANGS = """
import socket, sys, time
from trainer import control
control.COME_BACK_SECONDS = 0.1
c = control.Control(socket.socket(fileno=int(sys.argv[1])))
c.standing.applied = c.standing.prepared = 7
c.start()
c.enter("boot")
time.sleep(60)
"""


@contextmanager
def hanging() -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    """A process whose main thread hangs, and our end of its control socket."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", HANGS, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        try:
            ours.settimeout(20)
            assert ours.recv(1000)
            yield ours, process
        finally:
            process.kill()
            process.wait()


def order(connection: socket.socket, order: Order) -> None:
    connection.sendall(ORDER.dump_json(order) + b"\n")


def test_it_ends_when_its_agent_is_gone() -> None:
    with hanging() as (connection, process):
        connection.close()
        assert process.wait(20) == ExitCode.LEFT


def test_it_leaves_when_it_is_told_to() -> None:
    with hanging() as (connection, process):
        order(connection, Leave())
        assert process.wait(20) == ExitCode.LEFT


def test_a_main_thread_that_does_not_come_back_after_a_halt_counts_as_torn() -> None:
    with hanging() as (connection, process):
        order(connection, Halt())
        said = LINE.validate_json(connection.makefile("rb").readline())
        assert said == Halted(applied=7, prepared=7, torn=True, cause="ordered")
        assert process.wait(20) == ExitCode.PEER_LOST


@contextmanager
def control() -> Iterator[tuple[Control, socket.socket]]:
    """A control thread in this very process, which only ends itself when its agent goes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        control = Control(theirs, leave=sys.exit)
        control.start()
        yield control, ours
        ours.close()
        until(lambda: not any(thread.name == "control" for thread in threading.enumerate()))


def test_saying_never_waits_for_an_agent_that_does_not_read() -> None:
    with control() as (talking, ours):
        for step in range(20_000):
            talking.say(Finished(step=step))
        with ours.makefile("rb") as lines:
            heard = [LINE.validate_json(lines.readline()) for _ in range(20_000)]
        assert heard == [Finished(step=step) for step in range(20_000)]
        talking.flush()


def test_the_first_peer_to_hang_up_is_the_suspect_and_ends_a_read_on_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.control._DIRECT_SIGHT_SECONDS", 60.0)
    with control() as (watching, _):
        pairs = [socket.socketpair() for _ in range(3)]
        ours = {mine.dup(): rank for rank, (mine, _) in enumerate(pairs)}
        aborted = threading.Event()
        watching.watch(ours, aborted.set)
        watching.check()
        reader = threading.Thread(target=pairs[0][0].recv, args=[1])
        reader.start()
        began = time.monotonic()
        pairs[2][1].close()
        reader.join(10)
        assert not reader.is_alive()
        with pytest.raises(HaltingError):
            watching.check()
        assert aborted.wait(10)  # what NCCL waits for, no socket ends
        watching.halt_after_error("a call failed", (1,))
        assert time.monotonic() - began < 30
        # the others learn of it, but not at once: they are to see for themselves who died
        pairs[1][1].settimeout(10)
        assert pairs[1][1].recv(1) == b""
        assert time.monotonic() - began > 0.2
        for end in (*ours, *(end for pair in pairs for end in pair)):
            end.close()


def test_who_stands_still_does_what_it_is_ordered_and_is_never_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.control.COME_BACK_SECONDS", 0.0)
    with control() as (standing, ours), ours.makefile("rb") as lines:
        standing.standing.applied, standing.standing.holds = 7, (2, 3)
        done: list[Order] = []

        def stand_still() -> None:
            for one in standing.stand_still(limbo_seconds=20):
                done.append(one)
                standing.standing.applied += isinstance(one, Forward)
                if isinstance(one, Save):
                    return

        main = threading.Thread(target=stand_still)
        main.start()
        assert LINE.validate_json(lines.readline()) == PhaseBegun(phase=Phase.HALTED)
        order(ours, Halt())
        halted = Halted(applied=7, prepared=0, cause="ordered", holds=(2, 3))
        assert LINE.validate_json(lines.readline()) == halted
        forward, save = Forward(step=8, ballot=(0.1 + 0.2, None)), Save(layers=(2,))
        order(ours, forward)
        assert LINE.validate_json(lines.readline()) == halted.model_copy(update={"applied": 8})
        order(ours, Stay())  # nothing new is to be said of it
        again = Forward(step=9, ballot=(0.5,))
        order(ours, again)
        assert LINE.validate_json(lines.readline()) == halted.model_copy(update={"applied": 9})
        order(ours, save)
        main.join(10)
        assert done == [forward, again, save]


def test_a_stop_and_a_save_are_kept_for_the_next_vote() -> None:
    with control() as (running, ours):
        assert not running.is_to_stop.is_set() and not running.is_to_save.is_set()
        order(ours, Stop())
        order(ours, SaveNow())
        assert running.is_to_stop.wait(10) and running.is_to_save.wait(10)
        running.check()
