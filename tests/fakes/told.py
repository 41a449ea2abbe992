"""A store with a job, and the verbs by which a test reports to it and decides."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core import actions
from controller.core.actions import Decision
from controller.core.jobspec import JobSpec
from controller.core.states import Reason
from controller.core.world import World
from controller.store import jobs, nodes, reports
from controller.store.decisions import Fence, Here, Recorder
from controller.store.engine import Store
from controller.store.snapshot import Sign, Snapshots
from tests.fakes.agents import facts
from trainer.contract import progress
from trainer.contract.spec import ResumedFrom, RunSpec, Shape

LIFE = "first-life"
SHAPE = Shape(depth=1, replicas=2, micro_batch=4)
WEIGHTS = ResumedFrom(step=0, generation=1, folder="step-000000.g1")


def spec_of(name: str, **more: Any) -> JobSpec:
    fields = {"program": "builtin:gpt", "batch_size": 8, "steps": 9, "name": name, **more}
    return JobSpec.model_validate(fields)


class Told:
    """A store with two nodes and one job, and the verbs of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"sqlite:///{folder / 'varuna.db'}")
        self.at = 1000.0
        self.numbers = {"vm-1": 0, "vm-2": 0}
        for node in self.numbers:
            self.register(node)
        spec = spec_of("a", nodes=2, checkpoint={"dir": "/c"})
        self.store.write(lambda c: jobs.submit(c, "job_a", spec, self.at)).result()

    def register(self, node: str, incarnation: str = LIFE, *running: wire.RunningTrainer) -> None:
        asked = wire.Register(
            node=node, incarnation=incarnation, facts=facts(), running=tuple(running)
        )
        self.store.write(lambda c: nodes.register(c, asked, self.at)).result()

    def world(self) -> World:
        with self.store.read() as connection:
            return Snapshots().load(connection, {("vm-1", LIFE): Sign(self.at)}, 0.0)

    def decide(self, *what: actions.Action, fence: Fence | None = None) -> Recorder:
        (job,) = self.world().jobs
        fence = fence or Fence(job.id, job.state, job.last_number)
        here = Here(facts().boot_id, self.folder)

        def work(connection: sa.Connection) -> Recorder:
            recorder = Recorder(connection, self.at, here)
            recorder.record(Decision("job_a", what, "because"), fence, None)
            return recorder

        self.at += 1
        return self.store.write(work).result()

    def report(self, node: str, *bodies: wire.ReportBody) -> reports.Taken:
        numbered = [
            wire.Report(number=self.numbers[node] + i, body=body)
            for i, body in enumerate(bodies, 1)
        ]
        self.numbers[node] += len(bodies)
        self.at += 1
        return self.send(node, *numbered)

    def send(self, node: str, *numbered: wire.Report) -> reports.Taken:
        return self.store.write(lambda c: reports.take(c, node, LIFE, numbered, self.at)).result()

    def orders(self, node: str) -> tuple[wire.Order, ...]:
        with self.store.read() as connection:
            return nodes.standing_orders(connection, node, LIFE, 0)

    def rows(self, table: sa.Table) -> list[Any]:
        with self.store.read() as connection:
            return list(connection.execute(sa.select(table)).all())

    def plan(self, number: int = 2) -> Recorder:
        return self.decide(actions.PlanGeneration("job_a", number, "vm-1", LIFE, "planning"))

    def launch(self, number: int = 2) -> Recorder:
        seats = tuple(actions.SeatAt(node, LIFE, 0) for node in ("vm-1", "vm-2"))
        return self.decide(
            actions.Launch("job_a", number, "train", SHAPE, (0, 8), seats, WEIGHTS, "launching")
        )

    def end(self, number: int = 2) -> Recorder:
        return self.decide(actions.EndGeneration("job_a", number, Reason.NODE_LOST, False, "lost"))

    def spec(self, node: str) -> RunSpec:
        (start,) = [o.body for o in self.orders(node) if isinstance(o.body, wire.Start)]
        return start.spec


def said(rank: int, line: progress.Line, generation: int = 2) -> wire.Said:
    return wire.Said(job="job_a", generation=generation, rank=rank, line=line)
