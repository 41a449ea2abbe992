"""Where the deeds are done: agents of this machine, their controller, the disk of the checkpoints.

    Ground
      OwnGround    a cluster that was started for this and has a link and a disk to spoil
      DemoGround   (demo.py) a `varuna demo` that runs already, which brings back what was killed

What cannot be done here is left out with a reason, never done by halves: the list of deeds stays
the same, so that a seed means the same everywhere.
"""

import contextlib
import signal
from abc import ABC, abstractmethod
from collections import Counter

import psutil

from controller.chaos import processes
from controller.chaos.deeds import Deed, Verb
from controller.chaos.disk import Disk
from controller.chaos.links import Links
from controller.client.cluster import Cluster

_MENDED = (Verb.JOIN, Verb.CONTINUE, Verb.WAKE, Verb.MEND, Verb.STEADY)


class Ground(ABC):
    """Nodes of this machine, and what is wrong with them at the moment."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.done: Counter[Verb] = Counter()
        self.left_out: dict[Verb, str] = {}
        self.troubled: dict[str, Verb] = {}
        """Nodes that something is wrong with, by what."""
        self.controller_is_up = True
        self._stopped: dict[str, list[psutil.Process]] = {}
        self._slow_now = False

    def do(self, deed: Deed) -> None:
        """Carry it out, or leave it out with its reason."""
        if why := self.why_not(deed.verb):
            self.left_out[deed.verb] = why
            return
        self.done[deed.verb] += 1
        match deed.verb:
            case Verb.STOP:
                self._stop(deed.node, self._machine(deed.node))
            case Verb.HANG:
                self._stop(deed.node, self._machine(deed.node)[:1])
            case Verb.CONTINUE | Verb.WAKE | Verb.STEADY:
                self._continue(deed.node)
            case Verb.SLOW:
                pass  # tick by tick
            case _:
                self._do(deed)
        if deed.node and deed.verb in _MENDED:
            self.troubled.pop(deed.replaces or deed.node, None)
        elif deed.node:
            self.troubled[deed.node] = deed.verb

    @abstractmethod
    def why_not(self, verb: Verb) -> str:
        """Why it cannot be done here; empty: it can."""

    @abstractmethod
    def _do(self, deed: Deed) -> None:
        """Carry out what stopping and continuing processes is not enough for."""

    @abstractmethod
    def _machine(self, node: str) -> list[psutil.Process]:
        """Its processes, the agent first; nothing of one that has ended by itself."""

    @abstractmethod
    def dead(self) -> list[str]:
        """Agents that ended though nobody ended them."""

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

    def mend(self) -> None:
        """Let everything go on that was stopped; for a run that is broken off."""
        for node in list(self._stopped):
            self._continue(node)

    def _stop(self, node: str, who: list[psutil.Process]) -> None:
        self._stopped.setdefault(node, []).extend(who)
        processes.send(signal.SIGSTOP, who)

    def _continue(self, node: str) -> None:
        processes.send(signal.SIGCONT, self._stopped.pop(node, []))


class OwnGround(Ground):
    """A cluster of our own."""

    def __init__(self, cluster: Cluster, links: Links, disk: Disk, job: str) -> None:
        super().__init__(job)
        self._cluster = cluster
        self._links = links
        self._disk = disk

    def why_not(self, verb: Verb) -> str:
        """The disk is the only thing that may be missing."""
        return self._disk.why_not if verb in (Verb.DISK_FULL, Verb.DISK_FREE) else ""

    def _do(self, deed: Deed) -> None:
        match deed.verb:
            case Verb.KILL | Verb.TAKE:
                self._cluster.fleet.delete([deed.node])
            case Verb.JOIN:
                self._cluster.fleet.create([deed.node])
            case Verb.NOTICE:
                self._cluster.fleet.notice(deed.node, deed.seconds)
            case Verb.CUT:
                self._links.cut(deed.node)
            case Verb.MEND:
                self._links.mend(deed.node)
            case Verb.DISK_FULL:
                self._disk.fill()
            case Verb.DISK_FREE:
                self._disk.free()
            case Verb.CONTROLLER_KILL:
                self._cluster.kill_controller()
                self.controller_is_up = False
            case Verb.CONTROLLER_START:
                self._cluster.start_controller()
                self.controller_is_up = True

    def dead(self) -> list[str]:
        """As the fleet, which is their parent, sees it."""
        return [m.name for m in self._cluster.fleet.list() if m.state == "gone"]

    def _machine(self, node: str) -> list[psutil.Process]:
        agent, zygote = self._cluster.fleet.pids(node)
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(agent), *processes.zygote_children(zygote)]
        return []
