"""What a job has been through, from rows to the user's API: launches, checkpoints, recoveries, the
series of its steps, the ledger.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from controller.api import schemas
from controller.clock import moment, moment_or_none
from controller.core.states import GenerationState, Reason
from controller.store import history, ledger
from controller.store.proving import stride_of
from controller.store.tables import (
    checkpoints,
    evaluations,
    generations,
    jobs,
    nodes,
    parts,
    recoveries,
    seats,
    steps,
)
from trainer.contract.lineage import counts
from trainer.contract.topology import Seat

WORKING = [GenerationState.LAUNCHING, GenerationState.RUNNING, GenerationState.DRAINING,
           GenerationState.HALTED]  # fmt: skip
_MOST_EVALUATIONS = 1000


# ---- generations


def generation_views(connection: sa.Connection, job: str) -> list[schemas.GenerationView]:
    """By number."""
    return _generation_views(connection, job, sa.true())


def last_seated(connection: sa.Connection, job: str) -> schemas.GenerationView | None:
    """The newest that was given seats."""
    newest = sa.select(sa.func.max(seats.c.generation)).where(seats.c.job == job).scalar_subquery()
    found = _generation_views(connection, job, generations.c.number == newest)
    return found[0] if found else None


def _generation_views(
    connection: sa.Connection, job: str, which: sa.ColumnElement[bool]
) -> list[schemas.GenerationView]:
    seated = defaultdict(list)
    for seat in connection.execute(
        sa.select(seats)
        .join(generations)
        .where(seats.c.job == job, which)
        .order_by(seats.c.generation, seats.c.rank)
    ):
        seated[seat.generation].append(seat)
    rows = connection.execute(
        sa.select(generations).where(generations.c.job == job, which).order_by(generations.c.number)
    )
    return [_generation_view(row, seated[row.number]) for row in rows]


def last_launch(connection: sa.Connection, job: str) -> Any | None:
    """The newest generation that was given seats to train."""
    return connection.execute(
        sa.select(generations)
        .where(generations.c.job == job, generations.c.kind == "train")
        .order_by(generations.c.number.desc())
        .limit(1)
    ).one_or_none()


def shape_view(stored: Any) -> schemas.ShapeView | None:
    """From its JSON."""
    return schemas.ShapeView.model_validate(stored) if stored else None


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
    return schemas.CheckpointView(
        folder=row.folder,
        step=row.step,
        generation=row.generation,
        complete=row.complete_at is not None,
        in_lineage=counts(row, chain),
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
    """A generation that trained has halted or ended, nobody has gone on, the job is not over."""
    over = connection.execute(sa.select(jobs.c.finished_at).where(jobs.c.id == job)).scalar()
    was = connection.execute(
        sa.select(generations)
        .where(generations.c.job == job, generations.c.committed > 0)
        .order_by(generations.c.number.desc())
        .limit(1)
    ).one_or_none()
    still = (GenerationState.HALTED, GenerationState.ENDED)
    if over or was is None or was.state not in still or was.end_reason == Reason.USER.value:
        return None
    last = last_launch(connection, job)
    to = last if last is not None and last.number > was.number else None
    begun = history.resumed_from(to.resumed_from) if to is not None else None
    at_step = history.last_step(connection, was, begun)
    return schemas.RecoveryView(
        number=number,
        at_step=at_step,
        resumed_from=begun.step if begun else None,
        lost_steps=at_step - begun.step if begun else None,
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
    ends = (
        sa.select(
            steps.c.generation,
            sa.func.min(steps.c.step).label("first"),
            sa.func.max(steps.c.step).label("last"),
        )
        .where(of_job)
        .group_by(steps.c.generation)
        .subquery()
    )
    total = connection.execute(sa.select(sa.func.sum(ends.c.last - ends.c.first + 1))).scalar() or 0
    chain = history.lineage_of(connection, row.id)
    found = connection.execute(
        sa.select(steps)
        .join(ends, ends.c.generation == steps.c.generation)
        .where(of_job)
        .where(
            (steps.c.step % stride_of(total, points) == 0)
            | steps.c.step.in_([ends.c.first, ends.c.last])
        )
        .order_by(steps.c.at)
    ).all()
    return schemas.SeriesView(
        job=row.id,
        points=tuple(_point(step, chain) for step in found),
        thinned=len(found) < total,
        capacity=tuple(_capacity(connection, row)),
        evaluations=tuple(_evaluations(connection, row.id, chain)),
    )


def newest_evaluation(connection: sa.Connection, job: str) -> schemas.EvaluationPoint | None:
    """The newest that counts."""
    chain = history.lineage_of(connection, job)
    rows = connection.execute(_newest_evaluations(job))
    return next((_evaluation(row, chain) for row in rows if counts(row, chain)), None)


def _evaluations(
    connection: sa.Connection, job: str, chain: dict[int, int | None]
) -> list[schemas.EvaluationPoint]:
    rows = connection.execute(_newest_evaluations(job)).all()
    return [_evaluation(row, chain) for row in reversed(rows)]


def _newest_evaluations(job: str) -> sa.Select[Any]:
    return (
        sa.select(evaluations)
        .where(evaluations.c.job == job)
        .order_by(evaluations.c.at.desc())
        .limit(_MOST_EVALUATIONS)
    )


def _evaluation(row: Any, chain: dict[int, int | None]) -> schemas.EvaluationPoint:
    return schemas.EvaluationPoint(
        step=row.step,
        at=moment(row.at),
        generation=row.generation,
        loss=row.loss,
        metrics=row.metrics,
        samples=row.samples,
        seconds=row.seconds,
        superseded=not counts(row, chain),
    )


def _point(row: Any, chain: dict[int, int | None]) -> schemas.SeriesPoint:
    return schemas.SeriesPoint(
        step=row.step,
        at=moment(row.at),
        generation=row.generation,
        loss=row.loss,
        grad_norm=row.grad_norm,
        non_finite=row.loss is None or row.grad_norm is None,
        step_time_seconds=row.seconds,
        examples_per_second=row.samples / row.seconds if row.seconds > 0 else 0.0,
        superseded=not counts(row, chain),
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
        .join(seats)
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
    found = ledger.ledger_of(connection, row)
    gap = schemas.LedgerGap(step=found.gap_at, what=found.gap) if found.gap_at is not None else None
    return schemas.LedgerView(
        samples_committed_once=gap is None,
        steps=found.steps,
        samples=found.steps * row.spec["batch_size"],
        first_gap=gap,
        lineage=tuple(
            schemas.LedgerLink(
                generation=one.generation,
                first=one.first,
                last=one.last,
                samples=one.samples,
                sample_ids_hash=one.hash,
            )
            for one in found.ranges
        ),
        replay=replay_view(found.replay),
    )


def replay_view(found: ledger.Replay) -> schemas.ReplayView:
    """What was done again, compared."""
    return schemas.ReplayView(
        steps=found.steps,
        max_difference=found.max_difference,
        at_step=found.at_step,
        first_mismatch=found.mismatch,
    )
