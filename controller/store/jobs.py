"""Jobs as users deal with them: submitted once, found by id, name or prefix, cancelled for good."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from agent import wire
from controller.core.events import EventType
from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState
from controller.store import events
from controller.store.nodes import give_order
from controller.store.rows import changed
from controller.store.tables import OVER, generations, idempotency, jobs, seats

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class NameTakenError(Exception):
    """An unfinished job has this name."""


class KeyReusedError(Exception):
    """The idempotency key was used with another body."""


@dataclass(frozen=True)
class Remembered:
    """The first answer to an idempotency key."""

    job: str
    answer: str


def new_job_id(at: float) -> str:
    """``job_`` and 26 characters that sort by time (a ULID)."""
    number = int(at * 1000) << 80 | secrets.randbits(80)
    return "job_" + "".join(_CROCKFORD[number >> 5 * i & 31] for i in reversed(range(26)))


def submit(connection: sa.Connection, job: str, spec: JobSpec, at: float) -> None:
    """A new row, ``waiting``; the reconciler does the rest. Raises :class:`NameTakenError`."""
    name = spec.name or f"job-{job[-6:].lower()}"
    spec = spec.model_copy(update={"name": name})
    message = "Submitted."
    try:
        with connection.begin_nested():
            connection.execute(
                jobs.insert().values(
                    id=job,
                    name=name,
                    spec=spec.model_dump(mode="json"),
                    state=JobState.WAITING.value,
                    message=message,
                    cancel_wanted=False,
                    generation=0,
                    submitted_at=at,
                    waiting_since=at,
                )
            )
    except IntegrityError as error:
        raise NameTakenError(
            f"an unfinished job has the name {name}: cancel it first, or give another name"
        ) from error
    events.record(connection, at, EventType.JOB_SUBMITTED, f"{name} was submitted.", job=job)


def remembered(connection: sa.Connection, key: str, body_hash: str) -> Remembered | None:
    """What was answered to ``key`` before. Raises :class:`KeyReusedError`."""
    row = connection.execute(sa.select(idempotency).where(idempotency.c.key == key)).one_or_none()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise KeyReusedError("this Idempotency-Key was used with another body")
    return Remembered(row.job, row.answer)


def remember(
    connection: sa.Connection, key: str, body_hash: str, first: Remembered, at: float
) -> None:
    """Keep the first answer to ``key``."""
    connection.execute(
        idempotency.insert().values(
            key=key, body_hash=body_hash, job=first.job, answer=first.answer, created_at=at
        )
    )


def cancel(connection: sa.Connection, job: str, by: str, at: float) -> bool:
    """Write down that the job is to end; whether that was news.

    Over is over: no-op then.
    """
    news = changed(
        connection,
        jobs.update()
        .where(jobs.c.id == job, jobs.c.cancel_wanted.is_(False), jobs.c.state.not_in(OVER))
        .values(cancel_wanted=True),
    )
    if news:
        message = f"Cancellation was asked for by {by}."
        events.record(connection, at, EventType.CANCEL_ASKED, message, job=job)
    return bool(news)


def pause(connection: sa.Connection, job: str, by: str, at: float, *, wanted: bool) -> None:
    """Write down that the job is to pause, or to go on again; over is over, again is no news."""
    news = changed(
        connection,
        jobs.update()
        .where(jobs.c.id == job, jobs.c.pause_wanted.is_not(wanted), jobs.c.state.not_in(OVER))
        .values(pause_wanted=wanted),
    )
    if news:
        type_ = EventType.PAUSE_ASKED if wanted else EventType.RESUME_ASKED
        message = f"A {'pause' if wanted else 'resume'} was asked for by {by}."
        events.record(connection, at, type_, message, job=job)


def save_now(connection: sa.Connection, job: str, by: str, at: float) -> tuple[str, str] | None:
    """Order a checkpoint of the next step; who was told, or None: no step is on its way.

    One rank is enough: its flag rides on the vote, so all save after the same step.
    """
    seat = connection.execute(
        sa.select(seats)
        .join(generations)
        .where(seats.c.job == job, seats.c.rank == 0)
        .where(generations.c.state == GenerationState.RUNNING.value)
    ).one_or_none()
    if seat is None:
        return None
    order = wire.SaveNowOrder(job=job, generation=seat.generation)
    give_order(connection, seat.node, seat.incarnation, job, seat.generation, order, at)
    message = f"A checkpoint was asked for by {by}."
    events.record(connection, at, EventType.SAVE_ASKED, message, job=job)
    return seat.node, seat.incarnation


def find(connection: sa.Connection, reference: str) -> Any | None:
    """The row of the job with this id, else the newest of this name, else by unique id prefix."""
    by_id = connection.execute(sa.select(jobs).where(jobs.c.id == reference)).one_or_none()
    if by_id is not None:
        return by_id
    newest = sa.select(jobs).order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc())
    if named := connection.execute(newest.where(jobs.c.name == reference).limit(1)).one_or_none():
        return named
    if not reference.startswith("job_"):
        return None
    prefixed = jobs.c.id.startswith(reference, autoescape=True)
    found = connection.execute(newest.where(prefixed).limit(2)).all()
    return found[0] if len(found) == 1 else None


def listed(
    connection: sa.Connection,
    *,
    states: Collection[JobState],
    before: str | None,
    limit: int,
) -> list[Any]:
    """Newest first, of these states (empty: of all), older than the job with id ``before``."""
    query = sa.select(jobs).order_by(jobs.c.id.desc()).limit(limit)
    if states:
        query = query.where(jobs.c.state.in_([state.value for state in states]))
    if before:
        query = query.where(jobs.c.id < before)
    return list(connection.execute(query).all())
