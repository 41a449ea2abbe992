"""Taking over what runs: the store is an old copy (a backup was restored), trainers are not.

An agent that registers says what runs there, with the spec of each trainer and how it stands. A
generation newer than any that the store gave out was started by a controller that knew more: it is
written down as it runs, whatever the copy believed is over, and its number is taken. It is never
stopped for that. Seats that nobody comes to claim are nobody's: the reconciler finds them missing.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.core.states import GenerationState, JobState, Reason
from controller.core.words import times
from controller.store import events, nodes, reports
from controller.store.decisions import WITH_THE_GENERATION
from controller.store.rows import insert_new
from controller.store.tables import ENDED, OVER, generations, jobs, orders, seats
from trainer.contract.spec import RunSpec


def adopt(connection: sa.Connection, asked: wire.Register, at: float) -> None:
    """Take over what ``asked`` runs of newer generations."""
    newest: defaultdict[tuple[str, int], list[wire.RunningTrainer]] = defaultdict(list)
    for trainer in sorted(asked.running, key=lambda trainer: trainer.rank):
        if trainer.spec is not None:
            newest[trainer.job, trainer.generation].append(trainer)
    for trainers in newest.values():
        _adopt(connection, asked, trainers, at)


def _adopt(
    connection: sa.Connection,
    asked: wire.Register,
    trainers: Sequence[wire.RunningTrainer],
    at: float,
) -> None:
    spec = trainers[0].spec
    assert spec is not None
    job = connection.execute(sa.select(jobs).where(jobs.c.id == spec.job)).one_or_none()
    if job is None:
        message = f"{asked.node} runs {spec.job}, which this store does not know. It is left alone."
        events.record(connection, at, EventType.JOB_UNKNOWN, message, node=asked.node)
    if job is None or job.state in OVER:
        return
    if spec.generation > job.generation:
        _take_over(connection, job, spec, at)
    for device, trainer in enumerate(trainers):
        _claim(connection, asked, trainer, device, at)


def _take_over(connection: sa.Connection, job: Any, spec: RunSpec, at: float) -> None:
    """Write the generation of ``spec`` down as launched; what the copy thought current is over."""
    because = (
        f"Generation {spec.generation} runs already ({times(spec.shape)}), though this store knows"
        f" none above {job.generation}: it is an old copy. Taken over as it runs."
    )
    connection.execute(
        generations.update()
        .where(generations.c.job == job.id, generations.c.state != ENDED)
        .values(
            state=ENDED, ended_at=at, end_reason=Reason.LAUNCHING.value, end_because=because,
            charged=False,
        )
    )  # fmt: skip
    connection.execute(
        orders.update()
        .where(orders.c.job == job.id, orders.c.closed_at.is_(None))
        .where(orders.c.kind.in_(WITH_THE_GENERATION))
        .values(closed_at=at)
    )
    begun = spec.resumed_from
    connection.execute(
        generations.insert().values(
            job=job.id, number=spec.generation, kind=spec.kind,
            state=GenerationState.LAUNCHING.value, shape=spec.shape.model_dump(mode="json"),
            cuts=list(spec.cuts),
            resumed_from=begun.model_dump(mode="json") if begun else None,
            save_every=spec.saving.every_seconds, because=because, created_at=at, launched_at=at,
            committed=0, charged=False,
        )
    )  # fmt: skip
    # Who paused it has resumed it since, or it would not run.
    paused = job.state == JobState.PAUSED
    back = {"state": JobState.WAITING.value, "waiting_since": at} if paused else {}
    connection.execute(
        jobs.update()
        .where(jobs.c.id == job.id)
        .values(generation=spec.generation, pause_wanted=False, **back)
    )
    events.record(
        connection, at, EventType.GENERATION_ADOPTED, because,
        job=job.id, generation=spec.generation, was=job.generation,
    )  # fmt: skip


def _claim(
    connection: sa.Connection,
    asked: wire.Register,
    trainer: wire.RunningTrainer,
    device: int,
    at: float,
) -> None:
    """Seat ``trainer`` where it says it sits, if that seat of a generation that goes on is free."""
    going_on = connection.execute(
        sa.select(generations.c.number)
        .where(generations.c.job == trainer.job, generations.c.number == trainer.generation)
        .where(generations.c.state != ENDED, generations.c.shape.is_not(None))
    ).first()
    if going_on is None:
        return
    new = insert_new(
        connection, seats, job=trainer.job, generation=trainer.generation, rank=trainer.rank,
        node=asked.node, incarnation=asked.incarnation, device=device, phases={}, applied=0,
    )  # fmt: skip
    if new:
        for line in trainer.said:
            said = wire.Said(
                job=trainer.job, generation=trainer.generation, rank=trainer.rank, line=line
            )
            reports.take_line(connection, asked.node, asked.incarnation, said, at)


def release_what_is_over(connection: sa.Connection, asked: wire.Register, at: float) -> None:
    """What is warm for a job that is over must go; it ended while the agent was cut off."""
    job = connection.execute(sa.select(jobs).where(jobs.c.id == asked.warm_for)).one_or_none()
    if job is not None and job.state in OVER:
        over = wire.Release(job=job.id, generation=job.generation)
        nodes.give_order(
            connection, asked.node, asked.incarnation, job.id, job.generation, over, at
        )


def stop_what_is_void(connection: sa.Connection, asked: wire.Register, at: float) -> None:
    """Trainers of generations that are over must go: all older than the one that goes on, or than
    the next that a number will be given to. What the store does not know stays.
    """
    running = {(trainer.job, trainer.generation) for trainer in asked.running}
    for job in sorted({job for job, _ in running}):
        given = connection.execute(sa.select(jobs.c.generation).where(jobs.c.id == job)).scalar()
        if given is None:
            continue
        going_on = connection.execute(
            sa.select(sa.func.max(generations.c.number)).where(
                generations.c.job == job, generations.c.state != ENDED
            )
        ).scalar()
        last_void = (going_on or given + 1) - 1
        if any(number <= last_void for of, number in running if of == job):
            stop = wire.Stop(job=job, up_to_generation=last_void)
            nodes.give_order(connection, asked.node, asked.incarnation, job, last_void, stop, at)
