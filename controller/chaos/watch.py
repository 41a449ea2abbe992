"""What is seen while the deeds are done: by REST, in /proc and in the checkpoint folder.

It writes down; :mod:`controller.chaos.verdict` judges. Each checkpoint that a generation goes on
from is copied aside at once, so that it can be replayed though the job deletes it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from controller.api.schemas import CheckpointView, GenerationView, JobView
from controller.chaos import processes
from controller.chaos.verdict import Seen
from controller.client.rest import Controller, RefusedError, UnreachableError, job_path
from controller.core.states import GenerationState
from trainer.contract.checkpoints import FolderName

GRACE_SECONDS = 15.0
"""How long a trainer of an older generation may live beside a running newer one, on a node that
nothing is wrong with; a busy machine takes its time to kill.
"""
_LATE_SECONDS = 5.0
"""How long after a newer generation's marker an older one may still finish writing a part."""
_LOOK_SECONDS = 0.25
_LIST_SECONDS = 1.0

Identity = tuple[int, int, int]
"""Inode, time of change, size: another one under the same name was written by somebody again."""


@dataclass
class Watch:
    """One job under observation. :meth:`look` as often as there is time."""

    job: str
    root: Path
    """Its checkpoint folder."""
    aside: Path
    """Checkpoints are copied to ``<aside>/g<generation>/<folder>``."""
    ask: Callable[[], Controller]
    began: float
    """Monotonic."""
    seen: list[Seen] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    looks: int = 0
    """At files and processes."""
    _files: dict[str, Identity] = field(default_factory=dict)
    _markers: dict[int, float] = field(default_factory=dict)
    _copied: set[int] = field(default_factory=set)
    _running: dict[int, float] = field(default_factory=dict)
    """Generation -> when it was first seen running."""
    _quiet_since: dict[str, float] = field(default_factory=dict)
    _looked_at: float = 0.0
    _listed_at: float = 0.0

    def look(self, troubled: set[str], controller_is_up: bool) -> None:
        """Once; ``troubled``: the nodes that something is wrong with."""
        now = time.monotonic()
        for node in troubled:
            self._quiet_since[node] = now
        if now < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = now
        if controller_is_up:
            self._look_at_job(now)
        if now >= self._listed_at + _LIST_SECONDS:
            self._listed_at = now
            self.looks += 1
            if controller_is_up:
                self._look_at_generations(now)
            self._look_at_trainers(now, troubled)
            self._look_at_files()

    def condemned(self) -> int:
        """How many checkpoints were found damaged."""
        views = self.ask().all(job_path(self.job, "/checkpoints"), CheckpointView)
        return sum(view.condemned for view in views)

    def job_view(self) -> JobView:
        """The job as it is now."""
        return self.ask().get(job_path(self.job), JobView)

    def _look_at_job(self, now: float) -> None:
        with contextlib.suppress(UnreachableError):
            job = self.job_view()
            self.seen.append(
                Seen(now - self.began, job.generation or 0, job.step, job.last_checkpoint_step or 0)
            )

    def _look_at_generations(self, now: float) -> None:
        with contextlib.suppress(UnreachableError, RefusedError):
            path = job_path(self.job, "/generations")
            for generation in self.ask().all(path, GenerationView):
                if generation.state is GenerationState.RUNNING:
                    self._running.setdefault(generation.number, now)
                if generation.resumed_from and generation.number not in self._copied:
                    self._copied.add(generation.number)
                    folder = generation.resumed_from.folder
                    with contextlib.suppress(OSError):
                        shutil.copytree(
                            self.root / folder, self.aside / f"g{generation.number}" / folder
                        )

    def _look_at_trainers(self, now: float, troubled: set[str]) -> None:
        newest = max(self._running, default=0)
        if not newest:
            return
        for trainer in processes.trainers(self.job):
            quiet = max(self._quiet_since.get(trainer.node, 0.0), self._running[newest])
            old = trainer.generation < newest and trainer.node not in troubled
            if old and now > quiet + GRACE_SECONDS:
                self._complain(
                    f"rank {trainer.rank} of generation {trainer.generation} still lives on "
                    f"{trainer.node} {now - quiet:.0f} s after generation {newest} began"
                )

    def _look_at_files(self) -> None:
        for folder in _folders(self.root):
            for path in _entries(folder):
                if path.name.startswith("."):  # not there yet, by the layout's own rule
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    self._file(folder.name, path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        for marker in self.root.glob("gen-*.json"):
            number = marker.stem.removeprefix("gen-")
            if number.isdecimal() and int(number) not in self._markers:
                self._markers[int(number)] = marker.stat().st_mtime

    def _file(self, folder: str, path: Path, identity: Identity) -> None:
        name = f"{folder}/{path.name}"
        known = self._files.setdefault(name, identity)
        if known != identity:
            self._files[name] = identity
            self._complain(f"{name} was written twice")
        elif path.name.startswith("part-"):
            writer = FolderName.parse(folder)
            assert writer
            newer = [at for g, at in self._markers.items() if g > writer.generation]
            late = identity[1] / 1e9 - min(newer, default=float("inf"))
            if late > _LATE_SECONDS:
                self._complain(f"{name} was written {late:.0f} s after a newer generation began")

    def _complain(self, what: str) -> None:
        about = what.split(" s after")[0].rsplit(" ", 1)[0]
        if not any(said.startswith(about) for said in self.complaints):
            self.complaints.append(what)


def _folders(root: Path) -> list[Path]:
    return [path for path in _entries(root) if FolderName.parse(path.name)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []
