"""From rows to what the user's API shows. Reads, sums and words; decides nothing.

The dashboard reads through here too, so a page and an answer never differ.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.api import schemas
from controller.clock import moment, moment_or_none
from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState, NodeState, Reason
from controller.presence import Presence
from controller.store import history
from controller.store.nodes import GONE
from controller.store.tables import (
    checkpoints,
    events,
    generations,
    jobs,
    nodes,
    parts,
    recoveries,
    seats,
    steps,
)
from trainer.contract.topology import Seat

WORKING = [GenerationState.LAUNCHING, GenerationState.RUNNING, GenerationState.DRAINING,
           GenerationState.HALTED]  # fmt: skip


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
    last = _last_launch(connection, row.id)
    # A job whose nodes are all silent waits, while its generation may yet come back.
    active = row.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
    running = last if last is not None and last.state in WORKING and active else None
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
        shape=shape_view(last.shape) if last is not None else None,
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
        examples_per_second=spec.batch_size / seconds if seconds else None,
        step_time_seconds=seconds or None,
        last_checkpoint_step=_last_checkpoint(connection, row.id),
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


def _last_launch(connection: sa.Connection, job: str) -> Any | None:
    """The newest generation that was given seats to train."""
    return connection.execute(
        sa.select(generations)
        .where(generations.c.job == job, generations.c.kind == "train")
        .order_by(generations.c.number.desc())
        .limit(1)
    ).one_or_none()


def _progress(
    connection: sa.Connection, job: str, last: Any | None
) -> tuple[int, float | None, bool]:
    """(step, loss, whether that is not finite). A launch stands at what it resumed from; one that
    ended without a step says nothing, the one before counts.
    """
    generation, step = None, 0
    if last is not None and (last.committed or last.state in WORKING):
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
    saved = [
        view
        for view in checkpoint_views(connection, job)
        if view.complete and view.in_lineage and not view.condemned and not view.deleted
    ]
    return saved[-1].step if saved else None


def shape_view(stored: Any) -> schemas.ShapeView | None:
    """From its JSON."""
    return schemas.ShapeView.model_validate(stored) if stored else None


# ---- generations


def generation_views(connection: sa.Connection, job: str) -> list[schemas.GenerationView]:
    """By number."""
    seated = defaultdict(list)
    for seat in connection.execute(
        sa.select(seats).where(seats.c.job == job).order_by(seats.c.generation, seats.c.rank)
    ):
        seated[seat.generation].append(seat)
    rows = connection.execute(
        sa.select(generations).where(generations.c.job == job).order_by(generations.c.number)
    )
    return [_generation_view(row, seated[row.number]) for row in rows]


def _generation_view(row: Any, seated: Sequence[Any]) -> schemas.GenerationView:
    begun = history.resumed_from(row.resumed_from)
    return schemas.GenerationView(
        number=row.number,
        kind=row.kind,
        state=GenerationState(row.state),
        shape=shape_view(row.shape),
        cuts=tuple(row.cuts),
        seats=tuple(_seat_view(seat, row.shape) for seat in seated),
        resumed_from=(
            schemas.ResumedFromView(
                step=begun.step, generation=begun.generation, folder=begun.folder
            )
            if begun
            else None
        ),
        committed=row.committed,
        because=row.because,
        end_reason=Reason(row.end_reason) if row.end_reason else None,
        end_because=row.end_because,
        created_at=moment(row.created_at),
        launched_at=moment_or_none(row.launched_at),
        first_step_at=moment_or_none(row.first_step_at),
        ended_at=moment_or_none(row.ended_at),
    )


def _seat_view(row: Any, stored_shape: Any) -> schemas.SeatView:
    shape = history.shape_of(stored_shape)
    assert shape
    place = Seat.of(row.rank, shape)
    gone = row.exit or {}
    return schemas.SeatView(
        rank=row.rank,
        stage=place.stage,
        replica=place.replica,
        node=row.node,
        incarnation=row.incarnation,
        device=row.device,
        phase=row.phase,
        step=row.applied,
        failed=row.failed["message"] if row.failed else None,
        exit_code=gone.get("code"),
        exit_signal=gone.get("signal"),
    )


# ---- checkpoints, recoveries


def checkpoint_views(connection: sa.Connection, job: str) -> list[schemas.CheckpointView]:
    """By step."""
    chain = history.lineage_of(connection, job)
    written = defaultdict(list)
    for part in connection.execute(sa.select(parts).where(parts.c.job == job)):
        written[part.folder].append(part)
    rows = connection.execute(
        sa.select(checkpoints)
        .where(checkpoints.c.job == job)
        .order_by(checkpoints.c.step, checkpoints.c.generation)
    )
    return [_checkpoint_view(row, written[row.folder], chain) for row in rows]


def _checkpoint_view(
    row: Any, written: Sequence[Any], chain: dict[int, int | None]
) -> schemas.CheckpointView:
    bound = chain.get(row.generation, -1)
    return schemas.CheckpointView(
        folder=row.folder,
        step=row.step,
        generation=row.generation,
        complete=row.complete_at is not None,
        in_lineage=bound is None or row.step <= bound,
        condemned=row.condemned_at is not None,
        deleted=row.deleted_at is not None,
        size_bytes=sum(part.num_bytes for part in written),
        parts=len(written),
        layers_covered=len({layer for part in written for layer in part.layers}),
        layer_count=written[0].layer_count if written else 0,
        completed_at=moment_or_none(row.complete_at),
    )


def recovery_views(connection: sa.Connection, job: str) -> list[schemas.RecoveryView]:
    """In order; the last one may still be going on."""
    rows = connection.execute(
        sa.select(recoveries).where(recoveries.c.job == job).order_by(recoveries.c.to_generation)
    ).all()
    views = [
        schemas.RecoveryView(
            number=number,
            at_step=row.at_step,
            resumed_from=row.resumed_from,
            lost_steps=row.at_step - row.resumed_from,
            gap_s=row.gap_seconds,
            phases=schemas.RecoveryPhases.model_validate(row.phases),
            from_shape=row.from_shape,
            to_shape=row.to_shape,
            from_generation=row.from_generation,
            to_generation=row.to_generation,
            reason=Reason(row.reason) if row.reason else None,
            because=row.because,
            began_at=moment(row.began_at),
            ended_at=moment(row.ended_at),
        )
        for number, row in enumerate(rows, 1)
    ]
    going_on = _open_recovery(connection, job, len(views) + 1)
    return [*views, going_on] if going_on else views


def _open_recovery(connection: sa.Connection, job: str, number: int) -> schemas.RecoveryView | None:
    """A generation that trained has ended, nobody has gone on, and the job is not over."""
    over = connection.execute(sa.select(jobs.c.finished_at).where(jobs.c.id == job)).scalar()
    was = connection.execute(
        sa.select(generations)
        .where(generations.c.job == job, generations.c.committed > 0)
        .order_by(generations.c.number.desc())
        .limit(1)
    ).one_or_none()
    if over or was is None or was.state != GenerationState.ENDED:
        return None
    last = _last_launch(connection, job)
    to = last if last is not None and last.number > was.number else None
    begun = history.resumed_from(to.resumed_from) if to is not None else None
    return schemas.RecoveryView(
        number=number,
        at_step=was.committed,
        resumed_from=begun.step if begun else None,
        lost_steps=was.committed - begun.step if begun else None,
        gap_s=None,
        phases=schemas.RecoveryPhases.model_validate(history.phases_of(connection, was, to, None)),
        from_shape=str(history.shape_of(was.shape)),
        to_shape=str(history.shape_of(to.shape)) if to is not None else None,
        from_generation=was.number,
        to_generation=to.number if to is not None else None,
        reason=Reason(was.end_reason) if was.end_reason else None,
        because=was.end_because or "",
        began_at=moment(was.committed_at),
        ended_at=None,
    )


# ---- series, ledger


def series_view(connection: sa.Connection, row: Any, points: int) -> schemas.SeriesView:
    """At most about ``points`` steps: every n-th, and all firsts and lasts of generations."""
    of_job = steps.c.job == row.id
    total = connection.execute(
        sa.select(sa.func.count()).select_from(steps).where(of_job)
    ).scalar_one()
    stride = max(1, -(-total // points))
    ends = (
        sa.select(steps.c.generation, sa.func.min(steps.c.step), sa.func.max(steps.c.step))
        .where(of_job)
        .group_by(steps.c.generation)
    )
    firsts_and_lasts = [
        (generation, step)
        for generation, first, last in connection.execute(ends)
        for step in (first, last)
    ]
    kept = (steps.c.step % stride == 0) | sa.tuple_(steps.c.generation, steps.c.step).in_(
        firsts_and_lasts
    )
    chain = history.lineage_of(connection, row.id)
    found = connection.execute(sa.select(steps).where(of_job, kept).order_by(steps.c.at)).all()
    return schemas.SeriesView(
        job=row.id,
        points=tuple(_point(step, chain) for step in found),
        thinned=len(found) < total,
        capacity=tuple(_capacity(connection, row)),
    )


def _point(row: Any, chain: dict[int, int | None]) -> schemas.SeriesPoint:
    bound = chain.get(row.generation, 0)
    return schemas.SeriesPoint(
        step=row.step,
        at=moment(row.at),
        generation=row.generation,
        loss=row.loss,
        grad_norm=row.grad_norm,
        non_finite=row.loss is None or row.grad_norm is None,
        step_time_seconds=row.seconds,
        examples_per_second=row.samples / row.seconds if row.seconds > 0 else 0.0,
        superseded=bound is not None and row.step > bound,
    )


def _capacity(connection: sa.Connection, job: Any) -> Iterable[schemas.CapacityPoint]:
    """Live and used nodes at each change, from the job's submission to its end."""
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0])
    for node in connection.execute(sa.select(nodes.c.registered_at, nodes.c.gone_at)):
        changes[max(node.registered_at, job.submitted_at)][0] += 1
        if node.gone_at:
            changes[max(node.gone_at, job.submitted_at)][0] -= 1
    used = (
        sa.select(
            generations.c.launched_at,
            generations.c.ended_at,
            sa.func.count(sa.distinct(seats.c.node)).label("nodes"),
        )
        .join(
            seats,
            (seats.c.job == generations.c.job) & (seats.c.generation == generations.c.number),
        )
        .where(generations.c.job == job.id)
        .group_by(generations.c.number, generations.c.launched_at, generations.c.ended_at)
    )
    for generation in connection.execute(used):
        changes[generation.launched_at][1] += generation.nodes
        if generation.ended_at:
            changes[generation.ended_at][1] -= generation.nodes
    live = seated = 0
    for at in sorted(changes):
        if job.finished_at and at > job.finished_at:
            break
        live += changes[at][0]
        seated += changes[at][1]
        yield schemas.CapacityPoint(at=moment(at), live=live, used=seated)


def ledger_view(connection: sa.Connection, row: Any) -> schemas.LedgerView:
    """The proof, checked now."""
    ledger = history.ledger_of(connection, row)
    gap = (
        schemas.LedgerGap(step=ledger.gap_at, what=ledger.gap)
        if ledger.gap_at is not None
        else None
    )
    return schemas.LedgerView(
        samples_committed_once=gap is None,
        steps=ledger.steps,
        samples=ledger.steps * row.spec["batch_size"],
        first_gap=gap,
        lineage=tuple(
            schemas.LedgerLink(generation=link.generation, first=link.first, last=link.last)
            for link in ledger.links
        ),
    )


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
        .where(generations.c.state.in_([state.value for state in WORKING]))
        .order_by(seats.c.rank)
    ):
        seated[(seat.node, seat.incarnation)].append(seat)
    return [
        _node_view(row, seated[(row.name, row.incarnation)], presence, now)
        for row in connection.execute(query)
    ]


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
        heard_at=moment(heard),
        heard_seconds_ago=max(0.0, now - heard),
        gone_at=moment_or_none(row.gone_at),
    )


def event_views(
    connection: sa.Connection,
    *,
    job: str | None = None,
    after: int = 0,
    limit: int = 50,
    type_: str | None = None,
    newest: bool = False,
) -> list[schemas.EventView]:
    """Rising by seq above ``after``; with ``newest`` the last ``limit`` of them."""
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
        .where(generations.c.state.in_([state.value for state in WORKING]))
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
                job=row.job, step=step, loss=loss, examples_per_second=speed, at=moment(now)
            )
        )
    return found


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


def seated_names(connection: sa.Connection, job: str) -> list[str]:
    """The nodes that hold a seat of the job now."""
    rows = connection.execute(
        sa.select(seats.c.node)
        .join(
            generations,
            (generations.c.job == seats.c.job) & (generations.c.number == seats.c.generation),
        )
        .where(seats.c.job == job, generations.c.state.in_([state.value for state in WORKING]))
        .distinct()
    )
    return [row.node for row in rows]
