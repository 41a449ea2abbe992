"""Jobs: list, look at, cancel, pause, save, drill."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Query

from agent import wire
from controller.api import past, schemas, views
from controller.api.auth import Caller
from controller.api.deps import Here, job_row
from controller.api.errors import ProblemException, StrictRoute, not_found
from controller.bell import FEED, RECONCILER
from controller.cloud.local import kill_tree
from controller.core.events import EventType
from controller.core.states import JobState
from controller.logs import LogPiece
from controller.parts import Parts
from controller.store import conduct, events, jobs, nodes
from trainer.contract.costs import LayerCosts

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=StrictRoute)
Limit = Annotated[int, Query(ge=1, le=1000)]


# ---- look


@router.get("")
def list_jobs(
    here: Here,
    state: Annotated[list[JobState], Query()] = [],  # noqa: B006
    all: bool = False,
    after: str | None = None,
    limit: Limit = 50,
) -> schemas.Page[schemas.JobView]:
    """Newest first; without ``state`` or ``all`` those that are not over."""
    states = state or ([] if all else [s for s in JobState if not s.is_over])
    with here.store.read() as connection:
        rows = jobs.listed(connection, states=states, before=after, limit=limit + 1)
        items = views.job_views(connection, rows[:limit])
    return schemas.Page(items=items, next=items[-1].id if len(rows) > limit else None)


@router.get("/{job}")
def one_job(here: Here, job: str) -> schemas.JobView:
    """One job."""
    with here.store.read() as connection:
        return views.job_view(connection, job_row(connection, job))


@router.get("/{job}/costs")
def job_costs(here: Here, job: str) -> LayerCosts:
    """What its program costs, as measured and since learned; 404 before its first launch."""
    with here.store.read() as connection:
        row = job_row(connection, job)
    if row.costs is None:
        raise not_found(f"costs of {job!r}: nobody has measured it yet")
    return LayerCosts.model_validate(row.costs)


@router.get("/{job}/events")
def job_events(
    here: Here,
    job: str,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Limit = 50,
    type: EventType | None = None,
    last: Annotated[int | None, Query(ge=1, le=1000)] = None,
) -> schemas.Page[schemas.EventView]:
    """What has happened to it."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        return event_page(connection, row.id, after, limit, type, last)


def event_page(
    connection: sa.Connection,
    job: str | None,
    after: int,
    limit: int,
    type_: EventType | None,
    last: int | None,
) -> schemas.Page[schemas.EventView]:
    """A page of events; ``next`` when there may be more."""
    items = views.event_views(
        connection,
        job=job,
        after=after,
        limit=last or limit,
        type_=type_.value if type_ else None,
        newest=last is not None,
    )
    more = last is None and len(items) == limit
    return schemas.Page(items=items, next=items[-1].seq if more else None)


@router.get("/{job}/generations")
def job_generations(here: Here, job: str) -> schemas.Page[schemas.GenerationView]:
    """All launches, by number."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        return schemas.Page(items=past.generation_views(connection, row.id))


@router.get("/{job}/checkpoints")
def job_checkpoints(here: Here, job: str) -> schemas.Page[schemas.CheckpointView]:
    """All folders that are known of, by step."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        return schemas.Page(items=past.checkpoint_views(connection, row.id))


@router.get("/{job}/recoveries")
def job_recoveries(here: Here, job: str) -> schemas.Page[schemas.RecoveryView]:
    """What each loss cost."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        return schemas.Page(items=past.recovery_views(connection, row.id))


@router.get("/{job}/series")
def job_series(
    here: Here, job: str, points: Annotated[int, Query(ge=10, le=10_000)] = 1000
) -> schemas.SeriesView:
    """Loss, speed and capacity over time."""
    with here.store.read() as connection:
        return past.series_view(connection, job_row(connection, job), points)


@router.get("/{job}/ledger")
def job_ledger(here: Here, job: str) -> schemas.LedgerView:
    """The proof that every sample was committed once."""
    with here.store.read() as connection:
        return past.ledger_view(connection, job_row(connection, job))


@router.get("/{job}/logs")
def job_logs(
    here: Here,
    job: str,
    rank: Annotated[int | None, Query(ge=0)] = None,
    generation: Annotated[int | None, Query(ge=1)] = None,
    tail: Annotated[int, Query(ge=0, le=100_000)] = 200,
    offset: Annotated[int | None, Query(ge=0)] = None,
) -> schemas.LogView:
    """One rank's log (default: the newest launch's last stage of replica 0): its tail, or from
    ``offset`` on.
    """
    with here.store.read() as connection:
        row = job_row(connection, job)
        seat = views.log_seat(connection, row.id, generation, rank)
    if seat is None:
        raise ProblemException(404, "There is no such rank (yet).")
    if offset is None:
        piece = here.logs.tail(row.id, seat.generation, seat.rank, tail)
    else:
        piece = here.logs.read(row.id, seat.generation, seat.rank, offset)
    return _log_view(seat, piece, over=seat.over)


@router.get("/{job}/logs/setup")
def setup_log(
    here: Here,
    job: str,
    node: str | None = None,
    rank: Annotated[int | None, Query(ge=0)] = None,
    generation: Annotated[int | None, Query(ge=1)] = None,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> schemas.LogView:
    """What the newest `setup` printed (on ``node``), from ``offset`` on, and nothing else."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        found = views.set_up_seats(connection, row.id, generation, rank, node)
    if not found:
        raise ProblemException(404, "No VM was set up here (yet).")
    began = (s for s in found if here.logs.begins(row.id, s.generation, s.rank, wire.SETUP_BEGINS))
    seat = next(began, found[0])
    piece, is_done = here.logs.read(row.id, seat.generation, seat.rank, offset).up_to(
        wire.SETUP_ENDS
    )
    return _log_view(seat, piece, over=is_done or seat.over)


def _log_view(seat: views.LogSeat, piece: LogPiece, *, over: bool) -> schemas.LogView:
    return schemas.LogView(
        generation=seat.generation,
        rank=seat.rank,
        node=seat.node,
        offset=piece.offset,
        next_offset=piece.next_offset,
        text=piece.text,
        over=over,
    )


# ---- act


@router.post("/{job}/actions/cancel", status_code=202)
def cancel(here: Here, by: Caller, job: str) -> schemas.JobView:
    """The wish is durable first; the reconciler carries it out. Again is no error."""
    at = here.clock.now()

    def work(connection: sa.Connection) -> schemas.JobView:
        row = job_row(connection, job)
        jobs.cancel(connection, row.id, by.label, at)
        return views.job_view(connection, job_row(connection, row.id))

    view = here.store.write(work).result()
    here.ring(RECONCILER, FEED)
    return view


@router.post("/{job}/actions/pause", status_code=202)
def pause(here: Here, by: Caller, job: str) -> schemas.JobView:
    """All ranks stop after the same step and save it; then the job holds no nodes."""
    return _pause(here, by, job, wanted=True)


@router.post("/{job}/actions/resume", status_code=202)
def resume(here: Here, by: Caller, job: str) -> schemas.JobView:
    """A paused job goes on from where it stopped."""
    return _pause(here, by, job, wanted=False)


def _pause(here: Parts, by: Caller, job: str, *, wanted: bool) -> schemas.JobView:
    at = here.clock.now()

    def work(connection: sa.Connection) -> schemas.JobView:
        row = job_row(connection, job)
        jobs.pause(connection, row.id, by.label, at, wanted=wanted)
        return views.job_view(connection, job_row(connection, row.id))

    view = here.store.write(work).result()
    here.ring(RECONCILER, FEED)
    return view


@router.post("/{job}/actions/checkpoint", status_code=202)
def checkpoint(here: Here, by: Caller, job: str) -> schemas.JobView:
    """All ranks save after the same step, the next one, and train on."""
    at = here.clock.now()

    def work(connection: sa.Connection) -> tuple[schemas.JobView, tuple[str, str] | None]:
        row = job_row(connection, job)
        told = jobs.save_now(connection, row.id, by.label, at)
        return views.job_view(connection, row), told

    view, told = here.store.write(work).result()
    if told is None:
        raise ProblemException(409, f"{view.name} is {view.state}: there is no step to save.")
    here.ring(told, FEED)
    return view


@router.post("/{job}/actions/evict", status_code=202)
def evict(here: Here, job: str, drill: schemas.EvictRequest) -> schemas.EvictAnswer:
    """A drill: agents on this machine are killed like VMs that are reclaimed without notice."""
    with here.store.read() as connection:
        row = job_row(connection, job)
        facts = {node.name: wire.Facts.model_validate(node.facts)
                 for node in nodes.live_nodes(connection)}  # fmt: skip
        seated = views.seated_names(connection)
    others = {node: job for node, job in seated.items() if job != row.id}
    taken = _whom(drill, [node for node, job in seated.items() if job == row.id], facts)
    if theirs := [name for name in taken if name in others]:
        what = f"{', '.join(theirs)} works for another job ({others[theirs[0]]})."
        raise ProblemException(409, what)
    far = [name for name in taken if facts[name].boot_id != here.boot_id]
    if far:
        what = f"{', '.join(far)} is not on the controller's machine; only local agents are killed."
        raise ProblemException(409, what)
    at = here.clock.now()
    message = f"Drill: {', '.join(taken)} taken without notice."

    def note(connection: sa.Connection) -> None:
        conduct.drilled(connection, taken, at)
        events.record(
            connection, at, EventType.EVICTION_DRILL, message, job=row.id, nodes=list(taken)
        )

    here.store.write(note).result()
    with ThreadPoolExecutor(len(taken)) as pool:
        list(pool.map(kill_tree, [facts[name].pid for name in taken]))
    here.ring(RECONCILER, FEED)
    return schemas.EvictAnswer(nodes=tuple(taken))


def _whom(
    drill: schemas.EvictRequest, seated: Sequence[str], facts: dict[str, wire.Facts]
) -> list[str]:
    if drill.nodes:
        if unknown := [name for name in drill.nodes if name not in facts]:
            raise ProblemException(422, f"There is no live node {', '.join(unknown)}.")
        return list(dict.fromkeys(drill.nodes))
    candidates, wanted = sorted(set(seated) & set(facts)), drill.count or 1
    if wanted > len(candidates):
        what = f"The job has {len(candidates)} live nodes; {wanted} cannot be taken."
        raise ProblemException(409, what)
    return sorted(random.Random(drill.seed).sample(candidates, wanted))
