"""Where the deeds are done: agents of this machine, their controller, the disk of the checkpoints.

What cannot be done here is left out with a reason, never done by halves: the list of deeds stays
the same, so that a seed means the same everywhere.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from controller.chaos import processes
from controller.chaos.deeds import Deed, Verb
from controller.chaos.links import Links
from controller.cli.cluster import Cluster

DISK_BYTES = 256 << 20
_MENDED = (Verb.JOIN, Verb.CONTINUE, Verb.WAKE, Verb.MEND, Verb.STEADY)
_CLONE_NEWNS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Disk:
    """A small file system of its own for the checkpoints, that may be filled. A context manager;
    :attr:`why_not` says why there is none.

    It is mounted in a name space of mounts that this process makes for itself: it goes with the
    last process that was started from here, however that ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.why_not = ""
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = f"size={DISK_BYTES}"
        try:
            if _LIBC.unshare(_CLONE_NEWNS):
                raise PermissionError
            for command in (
                ["mount", "--make-rprivate", "/"],
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)],
            ):
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.why_not = "only root can mount a file system that may be filled"
        return self

    def __exit__(self, *_: object) -> None:
        if not self.why_not:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with self._filler.open("ab") as file:
            step = 16 << 20
            while step:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), step)
                    file.seek(0, os.SEEK_END)
                except OSError:
                    step = 0 if step <= 4096 else step // 2

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


@dataclass
class Ground:
    """A cluster of our own and what is wrong with it at the moment."""

    cluster: Cluster
    links: Links
    disk: Disk
    job: str
    done: Counter[Verb] = field(default_factory=Counter)
    left_out: dict[Verb, str] = field(default_factory=dict)
    troubled: dict[str, Verb] = field(default_factory=dict)
    """Nodes that something is wrong with, by what."""
    controller_is_up: bool = True
    _stopped: dict[str, list[psutil.Process]] = field(default_factory=dict)
    _slow_now: bool = False

    def do(self, deed: Deed) -> None:
        """Carry it out."""
        if why := self._why_not(deed):
            self.left_out[deed.verb] = why
            return
        self.done[deed.verb] += 1
        node, fleet = deed.node, self.cluster.fleet
        match deed.verb:
            case Verb.KILL | Verb.TAKE:
                fleet.delete([node])
            case Verb.JOIN:
                fleet.create([node])
            case Verb.STOP:
                self._stop(node, self._machine(node))
            case Verb.HANG:
                self._stop(node, self._machine(node)[:1])
            case Verb.CONTINUE | Verb.WAKE | Verb.STEADY:
                self._continue(node)
            case Verb.CUT:
                self.links.cut(node)
            case Verb.MEND:
                self.links.mend(node)
            case Verb.NOTICE:
                fleet.notice(node, deed.seconds)
            case Verb.DISK_FULL:
                self.disk.fill()
            case Verb.DISK_FREE:
                self.disk.free()
            case Verb.CONTROLLER_KILL:
                self.cluster.kill_controller()
                self.controller_is_up = False
            case Verb.CONTROLLER_START:
                self.cluster.start_controller()
                self.controller_is_up = True
        if node and deed.verb in _MENDED:
            del self.troubled[node]
        elif node:
            self.troubled[node] = deed.verb

    def tick(self) -> None:
        """The trainers of slow nodes stand still every other time."""
        self._slow_now = not self._slow_now
        for node in [name for name, verb in self.troubled.items() if verb is Verb.SLOW]:
            if self._slow_now:
                found = [t for t in processes.trainers(self.job) if t.node == node]
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._stop(node, [psutil.Process(trainer.pid) for trainer in found])
            else:
                self._continue(node)

    def dead(self) -> list[str]:
        """Agents that ended though nobody ended them."""
        return [m.name for m in self.cluster.fleet.list() if m.state == "gone"]

    def _why_not(self, deed: Deed) -> str:
        if deed.verb in (Verb.DISK_FULL, Verb.DISK_FREE):
            return self.disk.why_not
        return ""

    def _machine(self, node: str) -> list[psutil.Process]:
        """The agent first; nothing of one that has ended by itself."""
        agent, zygote = self.cluster.fleet.pids(node)
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(agent), *processes.zygote_children(zygote)]
        return []

    def _stop(self, node: str, who: list[psutil.Process]) -> None:
        self._stopped.setdefault(node, []).extend(who)
        processes.send(signal.SIGSTOP, who)

    def _continue(self, node: str) -> None:
        processes.send(signal.SIGCONT, self._stopped.pop(node, []))
