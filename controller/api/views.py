"""From rows to what the user's API shows. Reads, sums and words; decides nothing.

The dashboard reads through here too, so a page and an answer never differ.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.api import past, schemas
from controller.clock import moment, moment_or_none
from controller.core.events import EventType
from controller.core.jobspec import JobSpec
from controller.core.states import JobState, NodeState, Reason
from controller.presence import Presence
from controller.store import conduct, history
from controller.store.nodes import GONE
from controller.store.tables import (
    checkpoints,
    events,
    generations,
    jobs,
    nodes,
    seats,
    steps,
)
from trainer.contract.lineage import counts
from trainer.contract.progress import Phase

# ---- jobs


def job_views(connection: sa.Connection, rows: Sequence[Any]) -> list[schemas.JobView]:
    """One per row of ``jobs``, in their order."""
    ready = connection.execute(
        sa.select(sa.func.count())
        .select_from(nodes)
        .where(nodes.c.state.in_([NodeState.READY.value, NodeState.JOINING.value]))
    ).scalar_one()
    sums = history.recovery_sums(connection, [row.id for row in rows])
    return [_job_view(connection, row, ready, sums.get(row.id)) for row in rows]


def job_view(connection: sa.Connection, row: Any) -> schemas.JobView:
    """Of one row of ``jobs``."""
    return job_views(connection, [row])[0]


def _job_view(connection: sa.Connection, row: Any, ready: int, sums: Any) -> schemas.JobView:
    spec = JobSpec.model_validate(row.spec)
    last = past.last_launch(connection, row.id)
    # A job whose nodes are all silent waits, while its generation may yet come back.
    active = row.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
    running = last if last is not None and last.state in past.WORKING and active else None
    step, loss, non_finite = _progress(connection, row.id, last)
    seconds = (
        history.step_seconds(connection, row.id, running.number) if running is not None else 0.0
    )
    return schemas.JobView(
        id=row.id,
        name=row.name,
        state=JobState(row.state),
        reason=Reason(row.reason) if row.reason else None,
        message=row.message,
        program=spec.program,
        cancel_wanted=row.cancel_wanted,
        pause_wanted=row.pause_wanted,
        shape=past.shape_view(last.shape) if last is not None else None,
        cuts=tuple(last.cuts) if last is not None else (),
        generation=row.generation or None,
        nodes=schemas.NodeCounts(
            min=spec.nodes.min,
            max=spec.nodes.max,
            used=_seated_nodes(connection, running) if running is not None else 0,
            ready=ready,
        ),
        step=step,
        steps=spec.steps,
        batch_size=spec.batch_size,
        loss=loss,
        non_finite=non_finite,
        evaluation=past.newest_evaluation(connection, row.id) if spec.evaluate_every else None,
        examples_per_second=spec.batch_size / seconds if seconds else None,
        step_time_seconds=seconds or None,
        last_checkpoint_step=_last_checkpoint(connection, row.id),
        saving=last.save_because if last is not None else None,
        recoveries=sums.recoveries if sums else 0,
        gap_seconds=sums.gap if sums else 0.0,
        lost_steps=sums.lost if sums else 0,
        priority=spec.priority,
        drills=spec.drills,
        labels=spec.labels,
        submitted_at=moment(row.submitted_at),
        started_at=moment_or_none(row.started_at),
        finished_at=moment_or_none(row.finished_at),
        spec=spec,
    )


def _progress(
    connection: sa.Connection, job: str, last: Any | None
) -> tuple[int, float | None, bool]:
    """(step, loss, whether that is not finite). A launch stands at what it resumed from; one that
    ended without a step says nothing, the one before counts.
    """
    generation, step = None, 0
    if last is not None and (last.committed or last.state in past.WORKING):
        begun = history.resumed_from(last.resumed_from)
        if last.committed:
            generation, step = last.number, last.committed
        elif begun:
            generation, step = begun.generation, begun.step
    else:
        trained = connection.execute(
            sa.select(generations.c.number, generations.c.committed)
            .where(generations.c.job == job, generations.c.committed > 0)
            .order_by(generations.c.number.desc())
            .limit(1)
        ).one_or_none()
        if trained:
            generation, step = trained.number, trained.committed
    found = connection.execute(
        sa.select(steps.c.loss).where(
            steps.c.job == job, steps.c.generation == generation, steps.c.step == step
        )
    ).one_or_none()
    return (step, found.loss, found.loss is None) if found else (step, None, False)


def _seated_nodes(connection: sa.Connection, generation: Any) -> int:
    return connection.execute(
        sa.select(sa.func.count(sa.distinct(seats.c.node))).where(
            seats.c.job == generation.job, seats.c.generation == generation.number
        )
    ).scalar_one()


def _last_checkpoint(connection: sa.Connection, job: str) -> int | None:
    saved = connection.execute(
        sa.select(checkpoints.c.step, checkpoints.c.generation)
        .where(checkpoints.c.job == job, checkpoints.c.complete_at.is_not(None))
        .where(checkpoints.c.condemned_at.is_(None), checkpoints.c.deleted_at.is_(None))
        .order_by(checkpoints.c.step.desc())
    ).all()
    chain = history.lineage_of(connection, job)
    return next((row.step for row in saved if counts(row, chain)), None)


# ---- nodes, events


def node_views(
    connection: sa.Connection, presence: Presence, now: float, *, gone_too: bool = False
) -> list[schemas.NodeView]:
    """By name; the live ones, or all incarnations there ever were."""
    query = sa.select(nodes).order_by(nodes.c.name, nodes.c.registered_at)
    if not gone_too:
        query = query.where(nodes.c.state.not_in(GONE))
    seated = defaultdict(list)
    for seat in connection.execute(
        sa.select(seats.c.node, seats.c.incarnation, seats.c.rank, seats.c.job, jobs.c.name)
        .join(jobs, jobs.c.id == seats.c.job)
        .join(
            generations,
            (generations.c.job == seats.c.job) & (generations.c.number == seats.c.generation),
        )
        .where(generations.c.state.in_([state.value for state in past.WORKING]))
        .order_by(seats.c.rank)
    ):
        seated[(seat.node, seat.incarnation)].append(seat)
    aside = conduct.all_of_them(connection)
    return [
        _node_view(row, seated[(row.name, row.incarnation)], presence, now).model_copy(
            update={"quarantine": _quarantine(aside.get(row.name), now)}
        )
        for row in connection.execute(query)
    ]


def _quarantine(row: Any | None, now: float) -> schemas.QuarantineView | None:
    found = conduct.quarantine_of(row)
    if found is None or found.is_over or now >= found.until:
        return None
    return schemas.QuarantineView(because=found.because, until=moment(found.until))


def _node_view(row: Any, seated: Sequence[Any], presence: Presence, now: float) -> schemas.NodeView:
    key = (row.name, row.incarnation)
    facts = wire.Facts.model_validate(row.facts)
    sign, beat = presence.sign(key), presence.newest_beat(key)
    heard = max(row.heard_at, sign.heard_at) if sign else row.heard_at
    return schemas.NodeView(
        name=row.name,
        incarnation=row.incarnation,
        state=NodeState(row.state),
        suspect=sign is not None and sign.suspect_since is not None,
        job=seated[0].job if seated else None,
        job_name=seated[0].name if seated else None,
        ranks=tuple(seat.rank for seat in seated),
        devices=len(facts.devices),
        device_kind=facts.devices[0].kind,
        device_memory_bytes=min(device.memory_bytes for device in facts.devices),
        cores=facts.cores,
        memory_bytes=facts.memory_bytes,
        memory_free_bytes=beat.memory_free_bytes if beat else None,
        load1=beat.load1 if beat else None,
        hostname=facts.hostname,
        boot_id=facts.boot_id,
        pid=facts.pid,
        data_host=facts.data_host,
        zone=facts.zone,
        agent_version=facts.agent_version,
        torch_version=facts.torch_version,
        registered_at=moment(row.registered_at),
        leaves_at=moment_or_none(row.notice["deadline"]) if row.notice else None,
        heard_at=moment(heard),
        heard_seconds_ago=max(0.0, now - heard),
        gone_at=moment_or_none(row.gone_at),
        slow=row.slow["factor"] if row.slow and row.slow["over_at"] is None else None,
    )


def event_views(
    connection: sa.Connection,
    *,
    job: str | None = None,
    after: int = 0,
    limit: int = 50,
    type_: str | None = None,
    newest: bool = False,
    routine: bool = True,
) -> list[schemas.EventView]:
    """Rising by seq above ``after``; with ``newest`` the last ``limit`` of them; without
    ``routine`` none that a healthy job has all the time.
    """
    seq = events.c.seq
    query = (
        sa.select(events, jobs.c.name.label("job_name"))
        .join(jobs, jobs.c.id == events.c.job, isouter=True)
        .where(seq > after)
        .order_by(seq.desc() if newest else seq)
        .limit(limit)
    )
    if job is not None:
        query = query.where(events.c.job == job)
    if type_ is not None:
        query = query.where(events.c.type == type_)
    if not routine:
        query = query.where(events.c.type.not_in([t.value for t in EventType if t.is_routine]))
    rows = connection.execute(query).all()
    views = [schemas.EventView.model_validate(_event(row)) for row in rows]
    return views[::-1] if newest else views


def _event(row: Any) -> dict[str, Any]:
    at: datetime = moment(row.at)
    return {**row._mapping, "at": at}


def newest_seq(connection: sa.Connection) -> int:
    """Of the last event; 0 before any."""
    return connection.execute(sa.select(sa.func.max(events.c.seq))).scalar() or 0


def ticks(connection: sa.Connection, now: float, job: str | None) -> list[schemas.Tick]:
    """Where running jobs stand."""
    query = (
        sa.select(generations, jobs.c.spec)
        .join(jobs, jobs.c.id == generations.c.job)
        .where(generations.c.state.in_([state.value for state in past.WORKING]))
        .where(generations.c.committed > 0)
    )
    if job is not None:
        query = query.where(generations.c.job == job)
    found = []
    for row in connection.execute(query).all():
        step, loss, _ = _progress(connection, row.job, row)
        seconds = history.step_seconds(connection, row.job, row.number)
        speed = row.spec["batch_size"] / seconds if seconds else None
        found.append(
            schemas.Tick(
                job=row.job,
                step=step,
                loss=loss,
                examples_per_second=speed,
                at=moment(now),
                evaluated=_evaluated(connection, row),
            )
        )
    return found


def _evaluated(connection: sa.Connection, row: Any) -> int | None:
    if not row.spec.get("evaluate_every"):
        return None
    newest = past.newest_evaluation(connection, row.job)
    return newest.step if newest else None


# ---- seats


@dataclass(frozen=True)
class LogSeat:
    """Whose log is asked for."""

    generation: int
    rank: int
    node: str
    over: bool


def log_seat(
    connection: sa.Connection, job: str, generation: int | None, rank: int | None
) -> LogSeat | None:
    """The seat; by default of the newest launch, the last stage of replica 0."""
    query = (
        sa.select(seats, generations.c.shape, generations.c.state)
        .join(
            generations,
            (generations.c.job == seats.c.job) & (generations.c.number == seats.c.generation),
        )
        .where(seats.c.job == job)
        .order_by(seats.c.generation.desc(), seats.c.rank)
    )
    if generation is not None:
        query = query.where(seats.c.generation == generation)
    first = connection.execute(query.limit(1)).one_or_none()
    if first is None:
        return None
    wanted = rank if rank is not None else first.shape["depth"] - 1
    row = connection.execute(
        query.where(seats.c.generation == first.generation, seats.c.rank == wanted)
    ).one_or_none()
    if row is None:
        return None
    return LogSeat(row.generation, row.rank, row.node, over=row.exit_at is not None)


def set_up_seats(
    connection: sa.Connection,
    job: str,
    generation: int | None,
    rank: int | None,
    node: str | None,
) -> list[LogSeat]:
    """The seats that waited for a `setup`, the newest first: one of each node began it."""
    query = (
        sa.select(seats)
        .where(seats.c.job == job)
        .where(seats.c.phases[Phase.SETUP.value].as_float().is_not(None))
        .order_by(seats.c.generation.desc(), seats.c.rank)
    )
    asked = ((seats.c.generation, generation), (seats.c.rank, rank), (seats.c.node, node))
    for column, wanted in asked:
        if wanted is not None:
            query = query.where(column == wanted)
    return [
        LogSeat(row.generation, row.rank, row.node, over=row.exit_at is not None)
        for row in connection.execute(query)
    ]


def seated_names(connection: sa.Connection) -> dict[str, str]:
    """The nodes that hold a seat now, and the job each works for."""
    rows = connection.execute(
        sa.select(seats.c.node, seats.c.job)
        .join(
            generations,
            (generations.c.job == seats.c.job) & (generations.c.number == seats.c.generation),
        )
        .where(generations.c.state.in_([state.value for state in past.WORKING]))
        .distinct()
    )
    return {row.node: row.job for row in rows}
