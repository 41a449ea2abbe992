"""What the rows tell of a job's past: its lineage, its recoveries.

A *recovery* runs from the last step before the first loss to the first step after, over all
superseded launches. Its phases are cut by receive times of the controller's own clock:

    last step .. first fact of the loss   detect       .. the old trainers are gone   stop
    .. survivors are to stand still       decide       .. all ranks rendezvous        launch
    .. it ends: what they hold is saved   save         .. all ranks load              rendezvous
    .. the next launch is recorded        decide       .. all ranks compute           load
                                                       .. the first step commits      first_step

A restart from disk at once has no save, and one span of deciding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import sqlalchemy as sa

from controller.core.events import EventType
from controller.core.states import Reason
from controller.core.words import count, times
from controller.store import events
from controller.store.rows import insert_new
from controller.store.tables import checkpoints, generations, recoveries, seats, steps
from trainer.contract import lineage
from trainer.contract.progress import Phase
from trainer.contract.samples import hash_of
from trainer.contract.spec import ResumedFrom, Shape

PHASES = ("detect", "decide", "save", "stop", "launch", "rendezvous", "load", "first_step")
_RECENT_STEPS = 20


# ---- lineage


@dataclass(frozen=True)
class Proven:
    """A generation's steps up to ``through`` as one sum (:mod:`controller.store.proving`)."""

    through: int
    hash: str
    """Of their samples: the sum of the steps' own."""
    seconds: float


@dataclass(frozen=True)
class Link:
    """Steps ``first`` .. ``last`` of the lineage are those of ``generation``."""

    generation: int
    first: int
    last: int
    is_closed: bool
    """A later generation went on from ``last``."""
    proven: Proven
    """With ``through`` before ``first``: nothing is."""


@dataclass(frozen=True)
class _Ran:
    number: int
    resumed_from: ResumedFrom | None
    committed: int
    proven: Proven | None


@dataclass(frozen=True)
class _Saved:
    step: int
    generation: int
    resumed_from: ResumedFrom | None


def lineage_of(connection: sa.Connection, job: str) -> dict[int, int | None]:
    """Generation -> the highest of its steps that counts (None: all)."""
    return _chain(connection, job, _ran(connection, job))


def links_of(connection: sa.Connection, job: str) -> list[Link]:
    """The lineage as ranges of steps, by step."""
    ran = _ran(connection, job)
    chain = _chain(connection, job, ran)
    links = []
    for one in ran:
        if one.number in chain:
            bound = chain[one.number]
            first = one.resumed_from.step + 1 if one.resumed_from else 1
            last = one.committed if bound is None else bound
            if last >= first:
                proven = one.proven or Proven(first - 1, hash_of(0), 0.0)
                links.append(Link(one.number, first, last, bound is not None, proven))
    return links


def _ran(connection: sa.Connection, job: str) -> list[_Ran]:
    """All generations, by number."""
    rows = connection.execute(
        sa.select(
            generations.c.number,
            generations.c.resumed_from,
            generations.c.committed,
            generations.c.proven_through,
            generations.c.proven_hash,
            generations.c.proven_seconds,
        )
        .where(generations.c.job == job)
        .order_by(generations.c.number)
    )
    return [
        _Ran(
            row.number,
            resumed_from(row.resumed_from),
            row.committed,
            None
            if row.proven_through is None
            else Proven(row.proven_through, row.proven_hash, row.proven_seconds),
        )
        for row in rows
    ]


def _chain(connection: sa.Connection, job: str, ran: Sequence[_Ran]) -> dict[int, int | None]:
    saved = connection.execute(
        sa.select(checkpoints.c.step, checkpoints.c.generation, checkpoints.c.resumed_from).where(
            checkpoints.c.job == job
        )
    )
    return lineage.lineage_of(
        ran, [_Saved(c.step, c.generation, resumed_from(c.resumed_from)) for c in saved]
    )


def resumed_from(stored: Any) -> ResumedFrom | None:
    """From its JSON."""
    return ResumedFrom.model_validate(stored) if stored else None


def shape_of(stored: Any) -> Shape | None:
    """From its JSON."""
    return Shape.model_validate(stored) if stored else None


# ---- recoveries


def close_recovery(connection: sa.Connection, job: str, number: int, at: float) -> None:
    """Generation ``number`` has committed its first step at ``at``: write down how it came to that,
    if a generation before it had trained.
    """
    to = _generation(connection, job, number)
    was = connection.execute(
        sa.select(generations)
        .where(generations.c.job == job, generations.c.number < number)
        .where(generations.c.committed > 0)
        .order_by(generations.c.number.desc())
        .limit(1)
    ).one_or_none()
    if was is None or was.end_reason == Reason.USER.value:  # a pause is no recovery
        return
    begun = resumed_from(to.resumed_from)
    resumed = begun.step if begun else 0
    at_step = last_step(connection, was, begun)
    phases = phases_of(connection, was, to, at)
    gap = max(0.0, at - was.committed_at - step_seconds(connection, job, was.number))
    shapes = [str(shape_of(row.shape)) for row in (was, to)]
    new = insert_new(
        connection, recoveries, job=job, to_generation=number, from_generation=was.number,
        at_step=at_step, resumed_from=resumed, began_at=was.committed_at, ended_at=at,
        gap_seconds=gap, phases=phases, from_shape=shapes[0], to_shape=shapes[1],
        reason=was.end_reason, because=was.end_because or "",
    )  # fmt: skip
    if new:
        lost = at_step - resumed
        cause = (was.end_because or f"Generation {was.number} ended").rstrip(".")
        before, after = map(times, shapes)
        plan = f"re-planned {before} → {after}" if before != after else f"kept {before}"
        price = f"lost {count(lost, 'step')}" if lost else "no steps lost"
        message = f"{cause}; {plan}; resumed from step {resumed:,} ({price}, {gap:.1f} s)."
        events.record(
            connection, at, EventType.RECOVERED, message, job=job, generation=number,
            at_step=at_step, resumed_from=resumed, lost_steps=lost, gap_s=gap, phases=phases,
        )  # fmt: skip


def last_step(connection: sa.Connection, was: Any, begun: ResumedFrom | None) -> int:
    """The last step that generation ``was`` committed: some are reported after its end, and of some
    nothing is left but the checkpoint that its successor went on from (``begun``).
    """
    reported = connection.execute(
        sa.select(sa.func.max(steps.c.step)).where(
            steps.c.job == was.job, steps.c.generation == was.number
        )
    ).scalar()
    return max(int(was.committed), reported or 0, begun.step if begun else 0)


def phases_of(
    connection: sa.Connection, was: Any, to: Any | None, ended_at: float | None
) -> dict[str, float | None]:
    """The seconds of each phase; None where it has not got to yet. ``to`` is the newest launch."""
    new = seats_of(connection, to.job, to.number) if to is not None else []
    launched_at = to.launched_at if to is not None else None
    stood = was.still_at is not None
    spans = [
        ("detect", was.loss_at),
        ("decide", was.still_at if stood else launched_at),
        ("save", was.ended_at if stood else launched_at),
        ("decide", launched_at),
        ("stop", _stopped_at(seats_of(connection, was.job, was.number), new) or ended_at),
        ("launch", _all_reached(new, Phase.RENDEZVOUS) or ended_at),
        ("rendezvous", _all_reached(new, Phase.LOAD) or ended_at),
        ("load", _all_reached(new, Phase.FIRST_STEP) or ended_at),
        ("first_step", ended_at),
    ]
    return sum_of(was.committed_at, spans)


def sum_of(start: float, spans: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """The seconds of each phase, of spans in the order of time, each with its end. One that ends
    before an earlier one (they overlap) counts 0.
    """
    seconds: dict[str, float | None] = dict.fromkeys(PHASES)
    for phase, end in spans:
        if end is None:
            break
        seconds[phase] = (seconds[phase] or 0.0) + max(0.0, end - start)
        start = max(start, end)
    return seconds


def _stopped_at(old: Sequence[Any], new: Sequence[Any]) -> float | None:
    """When the last old trainer was gone from the nodes that go on."""
    staying = {(seat.node, seat.incarnation) for seat in new}
    exits = [seat.exit_at for seat in old if (seat.node, seat.incarnation) in staying]
    return max((at for at in exits if at), default=None)


def _all_reached(of: Sequence[Any], phase: Phase) -> float | None:
    times = [seat.phases.get(phase.value) for seat in of]
    return None if not times or None in times else max(times)


def step_seconds(connection: sa.Connection, job: str, generation: int) -> float:
    """The median of its newest steps; 0 when it has none."""
    recent = connection.execute(
        sa.select(steps.c.seconds)
        .where(steps.c.job == job, steps.c.generation == generation)
        .order_by(steps.c.step.desc())
        .limit(_RECENT_STEPS)
    ).scalars()
    return float(median([*recent] or [0.0]))


def _generation(connection: sa.Connection, job: str, number: int) -> Any:
    return connection.execute(
        sa.select(generations).where(generations.c.job == job, generations.c.number == number)
    ).one()


def seats_of(connection: sa.Connection, job: str, number: int) -> Sequence[Any]:
    """The rows of a generation's seats, by rank."""
    return connection.execute(
        sa.select(seats)
        .where(seats.c.job == job, seats.c.generation == number)
        .order_by(seats.c.rank)
    ).all()


def recovery_sums(connection: sa.Connection, jobs: Sequence[str]) -> Mapping[str, Any]:
    """Job -> row with count, gap, lost."""
    rows = connection.execute(
        sa.select(
            recoveries.c.job,
            sa.func.count().label("recoveries"),
            sa.func.sum(recoveries.c.gap_seconds).label("gap"),
            sa.func.sum(recoveries.c.at_step - recoveries.c.resumed_from).label("lost"),
        )
        .where(recoveries.c.job.in_(jobs))
        .group_by(recoveries.c.job)
    )
    return {row.job: row for row in rows}
