"""What the end-to-end tests are told with: nodes come and go, a job trains."""

import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import psutil

from controller.api.schemas import (
    CheckpointView,
    EventView,
    GenerationView,
    JobView,
    LedgerView,
    NodeView,
    RecoveryView,
    SeriesPoint,
    SeriesView,
)
from controller.client.cluster import Cluster
from controller.client.rest import job_path
from controller.core.states import GenerationState, JobState
from trainer.contract.progress import WINDOWS

T = TypeVar("T")
SECONDS = 90.0
MODEL = {"layers": 4, "width": 32, "heads": 2, "context": 32}
"""Of builtin:gpt: small enough for eight trainers on two cores."""

PROGRAMS = Path(__file__).parents[1] / "fakes" / "programs"
LEISURELY = {"program": "leisurely.py", "workdir": str(PROGRAMS), "args": {}}
"""For long runs: it leaves the machine to others."""


_SLICE_SECONDS = 0.01


def until(look: Callable[[], T | None], what: str, seconds: float = SECONDS) -> T:
    """Look until there is something; fail with ``what`` was waited for."""
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


@dataclass
class Scene:
    """A cluster and at most one job on it."""

    cluster: Cluster
    title: str
    job_id: str = ""
    stopped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """What earlier tests did to nodes of these names sets none of them aside."""
        with closing(sqlite3.connect(self.cluster.folder / "varuna.db")) as store, store:
            store.execute("DELETE FROM conduct")

    # --- nodes ----------------------------------------------------------------------------

    def add(self, *names: str) -> None:
        self.cluster.add(names)

    def kill(self, *names: str) -> None:
        """Agent, zygote and trainers at once, without a word."""
        self.cluster.fleet.delete(names)

    def stop(self, name: str) -> None:
        """Freeze the agent and all that belongs to it: no socket closes, nothing exits."""
        zygote = self.zygote_of(name)
        tree = [psutil.Process(self.pid_of(name)), zygote, *zygote.children(recursive=True)]
        for process in tree:
            process.send_signal(signal.SIGSTOP)
        self.stopped += [process.pid for process in tree]

    def wake(self) -> None:
        """Let all that was frozen go on."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    @contextmanager
    def slowed(self, name: str, share: float) -> Iterator[None]:
        """Its trainers run for that share of the time, as cpulimit does it: of every few
        milliseconds they stand still for the rest.
        """
        done = Event()
        thread = Thread(target=self._slow_down, args=(name, share, done))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _slow_down(self, name: str, share: float, done: Event) -> None:
        while not done.is_set():
            try:
                trainers = self.trainers_of(name)
            except (OSError, ValueError):  # its agent is writing the file
                trainers = []
            for _ in range(20):
                _signal(trainers, signal.SIGSTOP)
                time.sleep((1 - share) * _SLICE_SECONDS)
                _signal(trainers, signal.SIGCONT)
                time.sleep(share * _SLICE_SECONDS)

    def nodes(self) -> list[NodeView]:
        return self.cluster.nodes()

    def pid_of(self, name: str) -> int:
        """The agent's process."""
        return self.cluster.fleet.pids(name)[0]

    def zygote_of(self, name: str) -> psutil.Process:
        return psutil.Process(self.cluster.fleet.pids(name)[1])

    def trainers_of(self, name: str) -> list[psutil.Process]:
        """Those that its agent says run, not those that stand by for the next launch."""
        told = json.loads((self.cluster.folder / "agents" / name / "sessions.json").read_text())
        return [psutil.Process(int(pid)) for pid in told["sessions"]]

    # --- the job --------------------------------------------------------------------------

    def submit(self, steps: int, *, nodes: str = "1..8", **more: object) -> JobView:
        name = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[-40:].strip("-")
        spec: dict[str, object] = {
            "name": name,
            "program": "builtin:gpt",
            "args": MODEL,
            "nodes": nodes,
            "batch_size": 16,
            "steps": steps,
            "checkpoint": {
                "dir": str(self.cluster.folder / "ckpt"),
                "every": "10 steps",
                "keep": 99,
            },
        }
        job = self.cluster.controller.post("/api/v1/jobs", {"spec": spec | more}, JobView)
        self.job_id = job.id
        return job

    def job(self) -> JobView:
        return self.cluster.controller.get(job_path(self.job_id), JobView)

    def wait_for(self, *states: JobState, seconds: float = SECONDS) -> JobView:
        def look() -> JobView | None:
            job = self.job()
            assert job.state in states or not job.state.is_over, f"{job.state}: {job.message}"
            return job if job.state in states else None

        return until(look, f"{self.title} to be {' or '.join(states)}", seconds)

    def wait_for_step(self, step: int, seconds: float = SECONDS) -> JobView:
        def look() -> JobView | None:
            job = self.job()
            assert job.step >= step or not job.state.is_over, f"{job.state}: {job.message}"
            return job if job.step >= step else None

        return until(look, f"step {step} of {self.title}", seconds)

    @property
    def root(self) -> Path:
        """The job's checkpoint folder."""
        return self.cluster.folder / "ckpt" / self.job_id

    def act(self, action: str) -> JobView:
        """Pause, resume or checkpoint."""
        path = job_path(self.job_id, f"/actions/{action}")
        return self.cluster.controller.post(path, {}, JobView)

    def recoveries(self) -> list[RecoveryView]:
        return self.cluster.controller.all(job_path(self.job_id, "/recoveries"), RecoveryView)

    def wait_for_recovery(self, count: int) -> RecoveryView:
        """Until the job has recovered ``count`` times; the last of them."""

        def look() -> RecoveryView | None:
            over = [r for r in self.recoveries() if r.ended_at]
            return over[count - 1] if len(over) >= count else None

        return until(look, f"recovery {count} of {self.title}")

    def generations(self) -> list[GenerationView]:
        return self.cluster.controller.all(job_path(self.job_id, "/generations"), GenerationView)

    def running(self) -> GenerationView:
        """The generation that is committing steps."""

        def look() -> GenerationView | None:
            newest = self.generations()[-1]
            return newest if newest.state is GenerationState.RUNNING else None

        return until(look, "a running generation")

    def are_paced(self, generation: int) -> bool:
        """Whether all its ranks have told of enough windows of steps to be compared."""
        with closing(sqlite3.connect(self.cluster.folder / "varuna.db", 30)) as store:
            rows = store.execute(
                "SELECT paces FROM seats WHERE job = ? AND generation = ?",
                (self.job_id, generation),
            ).fetchall()
        return all(paces and len(json.loads(paces)) >= WINDOWS for (paces,) in rows)

    def node_of_rank(self, rank: int) -> str:
        return self.running().seats[rank].node

    def checkpoints(self) -> list[CheckpointView]:
        return self.cluster.controller.all(job_path(self.job_id, "/checkpoints"), CheckpointView)

    def ledger(self) -> LedgerView:
        return self.cluster.controller.get(job_path(self.job_id, "/ledger"), LedgerView)

    def said(self, words: str) -> EventView | None:
        """The first event of the job that has ``words`` in its sentence."""
        events = self.cluster.controller.all(job_path(self.job_id, "/events"), EventView)
        return next((event for event in events if words in event.message), None)

    def series(self) -> SeriesView:
        path = job_path(self.job_id, "/series")
        return self.cluster.controller.get(path, SeriesView, points=10000)

    def losses(self) -> dict[int, float]:
        """Of each step that counts."""
        series = self.series()
        assert not series.thinned
        points: Sequence[SeriesPoint] = [p for p in series.points if not p.superseded]
        assert all(p.loss is not None for p in points)
        return {p.step: p.loss for p in points if p.loss is not None}

    def clear(self) -> None:
        """Cancel what runs and remove all nodes."""
        self.wake()
        if self.job_id and not self.job().state.is_over:
            self.cluster.controller.post(job_path(self.job_id, "/actions/cancel"), {}, JobView)
            self.wait_for(JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED)
        self.cluster.fleet.delete([machine.name for machine in self.cluster.fleet.list()])
        self._forget_conduct()

    def _forget_conduct(self) -> None:
        """Scenes share names: what a node did in this one is not held against the next one's."""
        with closing(sqlite3.connect(self.cluster.folder / "varuna.db", 30)) as store, store:
            store.execute("DELETE FROM conduct")


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
