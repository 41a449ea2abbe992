"""A run on a cluster of its own, with links and a disk to spoil; it leaves nothing behind."""

import contextlib
import getpass
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import httpx2

from controller.api.schemas import JobView
from controller.chaos import processes, verdict
from controller.chaos.deeds import Deed
from controller.chaos.disk import Disk
from controller.chaos.ground import OwnGround
from controller.chaos.links import Links
from controller.chaos.replay import replay
from controller.chaos.report import Report
from controller.chaos.trial import Trial
from controller.chaos.watch import Watch
from controller.client.cluster import Cluster
from controller.client.jobs import send
from controller.client.rest import job_path
from controller.client.waiting import until
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange, Plan

MODEL = {"layers": 4, "width": 64, "heads": 4, "context": 64}
"""Of builtin:gpt. Small: what is tried is not the arithmetic."""
_MARK = "CHAOS_RUN"
"""The variable by which everything that was started from here is found again."""
_CACHES = (f"torchinductor_{getpass.getuser()}",)
"""Which others keep in the folder of temporary files, on purpose."""
_CANCEL_SECONDS = 60.0
_GONE_SECONDS = 15.0


class OwnRun:
    """Everything is in ``folder``; ``report`` is filled in."""

    def __init__(self, folder: Path, names: Sequence[str], report: Report) -> None:
        self._folder = folder
        self._names = names
        self._report = report
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._aside = folder / "aside"
        self._temporary = folder / "tmp"

    def go(self, deeds: Sequence[Deed]) -> None:
        """All of it, to the last process."""
        self._aside.mkdir()
        self._temporary.mkdir()
        with self._surroundings(), Disk(self._folder / "checkpoints") as disk:
            with Cluster(self._folder / "cluster", 0) as cluster, _links_to(cluster) as links:
                cluster.fleet.way = links.url
                cluster.fleet.wait_for_torch()
                cluster.add(self._names)
                job = self._submit(cluster, disk)
                root = disk.folder / job.id
                watch = Watch(
                    job.id, root, self._aside, lambda: cluster.controller, time.monotonic()
                )
                trial = Trial(OwnGround(cluster, links, disk, job.id), watch, self._report)
                launches = trial.go(deeds, self._report.seconds)
                left = self._end_job(cluster, watch)
                replays = replay(job.spec, launches, self._aside, cluster.fleet.lend_zygote)
                ports = processes.ports_of(processes.marked(self._mark))
            left += self._left(ports, root)
        self._report.invariants += [
            verdict.one_writer(watch.complaints, watch.looks),
            verdict.nobody_died([f"agent of {name}" for name in watch.deaths]),
            verdict.nothing_left(left),
            verdict.replays_equal(launches, replays),
        ]

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
            nodes=NodeRange(min=self._report.minimum, max=len(self._names)),
            batch_size=32,
            steps=1_000_000,
            seed=self._report.seed,
            plan=Plan(settle=3.0, depth=_depths(self._report)),
            checkpoint=Checkpointing(dir=str(disk.folder), every=Every(seconds=2.0), keep=3),
        )
        return send(cluster.controller, spec, None)

    def _end_job(self, cluster: Cluster, watch: Watch) -> list[str]:
        """Cancel it; what of it is not gone then."""
        cluster.controller.post(job_path(watch.job, "/actions/cancel"), {}, JobView)
        if not until(lambda: watch.job_view().state.is_over, _CANCEL_SECONDS):
            return ["a job that was cancelled and is not over"]
        until(lambda: not processes.trainers(watch.job), _GONE_SECONDS)
        return [
            f"the trainer of rank {t.rank} on {t.node} (process {t.pid})"
            for t in processes.trainers(watch.job)
        ]

    def _left(self, ports: set[int], root: Path) -> list[str]:
        """What is there though all has ended."""
        until(lambda: not processes.marked(self._mark), _GONE_SECONDS)
        left = [f"process {p.pid} ({p.name()})" for p in processes.marked(self._mark)]
        left += [f"port {port}" for port in sorted(ports & processes.listening())]
        left += [str(path) for path in self._temporary.iterdir() if path.name not in _CACHES]
        left += [str(path) for path in root.rglob(".*")]
        return left


def _depths(report: Report) -> NodeRange | Literal["auto"]:
    """Odd seeds try pipelines, whatever the planner thinks of them for so small a model."""
    deepest = min(3, report.nodes)
    return NodeRange(min=min(2, report.minimum), max=deepest) if report.seed % 2 else "auto"


def _links_to(cluster: Cluster) -> Links:
    return Links(lambda: httpx2.URL(cluster.controller.place.url).port or 0)
