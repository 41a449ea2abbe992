"""What the kernel does for a zygote and its children: who dies with whom, who is whose."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

from trainer.contract.progress import ExitCode

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def be_subreaper() -> None:
    """Who is orphaned below this process becomes its child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed when ``parent``, of which this process is a fresh child, ends; or end now."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(ExitCode.LEFT)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_LIBC = ctypes.CDLL(None, use_errno=True)


def next_dead() -> os.waitid_result | None:
    """A child that has died and still keeps its number; None when there is none."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_session(pid: int) -> None:
    """With all of the session that it leads, or will."""
    kill(pid)  # a child that has no session yet
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def children_of(parent: int) -> Iterator[int]:
    """The living children of ``parent``."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, ppid = file.read().rpartition(b")")[2].split()[:2]
                if int(ppid) == parent and state != b"Z":
                    yield int(name)


def open_descriptors() -> set[int]:
    """Those that are open; that of this very listing is not any more."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {descriptor for descriptor in listed if os.path.exists(f"/proc/self/fd/{descriptor}")}
