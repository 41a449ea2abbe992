"""One run: a cluster, a job, the deeds at their times, and what came of it."""

import contextlib
import functools
import getpass
import os
import secrets
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx2

from controller.api.schemas import (
    GenerationView,
    JobView,
    LedgerView,
    RecoveryView,
    SeriesPoint,
    SeriesView,
)
from controller.chaos import processes, verdict
from controller.chaos.deeds import Deed
from controller.chaos.ground import Disk, Ground
from controller.chaos.links import Links
from controller.chaos.replay import replay
from controller.chaos.report import Report
from controller.chaos.verdict import Launch, Replay
from controller.chaos.watch import Watch
from controller.cli import output
from controller.cli.client import CliError, job_path
from controller.cli.cluster import Cluster
from controller.cli.jobs import send
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange, Plan
from controller.core.states import JobState

MODEL = {"layers": 4, "width": 64, "heads": 4, "context": 64}
"""Of builtin:gpt. Small: what is tried is not the arithmetic."""
_MARK = "CHAOS_RUN"
"""The variable by which everything that was started from here is found again."""
_CACHES = (f"torchinductor_{getpass.getuser()}",)
"""Which others keep in the folder of temporary files, on purpose."""
_TURN_SECONDS = 0.05
_FIRST_SECONDS = 120.0
_QUIET_SECONDS = 120.0
"""For the steps after the last deed."""
_CANCEL_SECONDS = 60.0
_GONE_SECONDS = 15.0


class Run:
    """Everything is in ``folder``; ``report`` is filled in."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        minimum: int,
        deeds: Sequence[Deed],
        seconds: float,
        report: Report,
    ) -> None:
        self._folder = folder
        self._names = names
        self._minimum = minimum
        self._deeds = deque(deeds)
        self._seconds = seconds
        self._report = report
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._aside = folder / "aside"
        self._temporary = folder / "tmp"

    def go(self) -> None:
        """All of it, to the last process."""
        self._aside.mkdir()
        self._temporary.mkdir()
        with self._surroundings(), Disk(self._folder / "checkpoints") as disk:
            with Cluster(self._folder / "cluster", 0) as cluster, _links_to(cluster) as links:
                cluster.fleet.way = links.url
                cluster.fleet.wait_for_torch()
                cluster.add(self._names)
                job = self._submit(cluster, disk)
                watch = self._watch(cluster, disk, job)
                self._wait_for_the_first_steps(watch)
                ground = Ground(cluster, links, disk, job.id)
                self._do_all(ground, watch)
                problem = self._wait_until_quiet(ground, watch)
                launches = self._look_back(cluster, watch, problem)
                left = self._end_job(cluster, watch)
                ports = processes.ports_of(processes.marked(self._mark))
            left += self._left(ports, watch.root)
        self._report.done, self._report.left_out = ground.done, ground.left_out
        self._report.invariants += [
            verdict.one_writer(watch.complaints, watch.looks),
            verdict.nobody_died([f"agent of {name}" for name in watch.deaths]),
            verdict.nothing_left(left),
            verdict.replays_equal(launches, self._replay(job, launches)),
        ]

    def _replay(self, job: JobView, launches: Sequence[Launch]) -> list[Replay]:
        trained = verdict.that_trained(launches)
        output.note(f"Replaying the first steps of {len(trained)} generations.")
        return replay(job.spec, trained, self._aside)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What is started from here carries our mark, and its temporary files are in our folder,
        as is the word of where its controller is.
        """
        name, _, value = self._mark.partition("=")
        ours = {
            name: value,
            "TMPDIR": str(self._temporary),
            "VARUNA_CONFIG_DIR": str(self._folder / "config"),
        }
        before = {key: os.environ.get(key) for key in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for key, was in before.items():
                if was is None:
                    del os.environ[key]
                else:
                    os.environ[key] = was

    def _submit(self, cluster: Cluster, disk: Disk) -> JobView:
        spec = JobSpec(
            name="chaos",
            program="builtin:gpt",
            args=dict(MODEL),
            nodes=NodeRange(min=self._minimum, max=len(self._names)),
            batch_size=32,
            steps=1_000_000,
            seed=self._report.seed,
            plan=Plan(settle=3.0),
            checkpoint=Checkpointing(dir=str(disk.folder), every=Every(seconds=2.0), keep=3),
        )
        return send(cluster.controller, spec, None)

    def _watch(self, cluster: Cluster, disk: Disk, job: JobView) -> Watch:
        root = disk.folder / job.id
        return Watch(job.id, root, self._aside, lambda: cluster.controller, time.monotonic())

    def _wait_for_the_first_steps(self, watch: Watch) -> None:
        deadline = time.monotonic() + _FIRST_SECONDS
        while (job := watch.job_view()).step < verdict.MORPH_STEPS:
            watch.look(set(), controller_is_up=True)
            if job.state.is_over or time.monotonic() > deadline:
                raise CliError(f"The job has not begun to train: {job.message}")
            time.sleep(_TURN_SECONDS)

    def _do_all(self, ground: Ground, watch: Watch) -> None:
        """Each deed at its time, or as soon after as the ones before leave room."""
        watch.began = began = time.monotonic()
        while self._deeds or time.monotonic() < began + self._seconds:
            while self._deeds and time.monotonic() >= began + self._deeds[0].at:
                deed = self._deeds.popleft()
                output.note(str(deed))
                ground.do(deed)
            self._turn(ground, watch)

    def _turn(self, ground: Ground, watch: Watch) -> None:
        ground.tick()
        watch.deaths += [name for name in ground.dead() if name not in watch.deaths]
        watch.look(set(ground.troubled), ground.controller_is_up)
        time.sleep(_TURN_SECONDS)

    def _wait_until_quiet(self, ground: Ground, watch: Watch) -> str:
        """Until enough steps were committed after the last deed; else why not."""
        deadline = time.monotonic() + _QUIET_SECONDS
        done: dict[int, int] = {}
        while time.monotonic() < deadline:
            self._turn(ground, watch)
            job = watch.job_view()
            if job.state.is_over:
                return f"it is {job.state}: {job.message}"
            first = done.setdefault(job.generation or 0, job.step)
            if job.state is JobState.RUNNING and job.step > first + verdict.MORPH_STEPS:
                return ""
        return f"no {verdict.MORPH_STEPS} steps within {_QUIET_SECONDS:.0f} s: {job.message}"

    def _look_back(self, cluster: Cluster, watch: Watch, problem: str) -> list[Launch]:
        """What the controller knows of the whole run, judged; the generations that trained."""
        ask, path = cluster.controller, functools.partial(job_path, watch.job)
        job = ask.get(path(), JobView)
        ledger = ask.get(path("/ledger"), LedgerView)
        points = ask.get(path("/series"), SeriesView, points=10_000).points
        generations = ask.all(path("/generations"), GenerationView)
        recoveries = ask.all(path("/recoveries"), RecoveryView)
        launches = _launches(generations, points)
        gap = ledger.first_gap
        report = self._report
        report.invariants = [
            verdict.went_on(problem, job.step),
            verdict.each_sample_once(ledger.steps, f"step {gap.step}: {gap.what}" if gap else None),
            verdict.steps_monotone(watch.seen, launches),
            verdict.nothing_saved_is_lost(watch.seen, launches, watch.condemned()),
        ]
        report.steps, report.recoveries = job.step, job.recoveries
        report.lost_steps = job.lost_steps
        gaps = [view.gap_s for view in recoveries if view.gap_s is not None]
        report.median_gap_s = statistics.median(gaps) if gaps else None
        kept = [point for point in points if not point.superseded]
        wall = (kept[-1].at - kept[0].at).total_seconds() + kept[0].step_time_seconds
        share = job.step / len(kept)  # of a thinned series
        report.goodput = min(1.0, share * sum(point.step_time_seconds for point in kept) / wall)
        return launches

    def _end_job(self, cluster: Cluster, watch: Watch) -> list[str]:
        """Cancel it; what of it is not gone then."""
        cluster.controller.post(job_path(watch.job, "/actions/cancel"), {}, JobView)
        if not _until(lambda: watch.job_view().state.is_over, _CANCEL_SECONDS):
            return ["a job that was cancelled and is not over"]
        _until(lambda: not processes.trainers(watch.job), _GONE_SECONDS)
        return [
            f"the trainer of rank {t.rank} on {t.node} (process {t.pid})"
            for t in processes.trainers(watch.job)
        ]

    def _left(self, ports: set[int], root: Path) -> list[str]:
        """What is there though all has ended."""
        _until(lambda: not processes.marked(self._mark), _GONE_SECONDS)
        left = [f"process {p.pid} ({p.name()})" for p in processes.marked(self._mark)]
        left += [f"port {port}" for port in sorted(ports & processes.listening())]
        left += [str(path) for path in self._temporary.iterdir() if path.name not in _CACHES]
        left += [str(path) for path in root.rglob(".*")]
        return left


def _links_to(cluster: Cluster) -> Links:
    return Links(lambda: httpx2.URL(cluster.controller.place.url).port or 0)


def _launches(generations: Sequence[GenerationView], points: Sequence[SeriesPoint]) -> list[Launch]:
    """Those that were given seats to train, by number."""
    losses: defaultdict[int, dict[int, float | None]] = defaultdict(dict)
    for point in points:
        losses[point.generation][point.step] = point.loss
    return [
        Launch(g.number, g.resumed_from.step, losses[g.number], g.shape.micro_batch)
        for g in generations
        if g.launched_at and g.resumed_from and g.shape
    ]


def _until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TURN_SECONDS)
    return True
