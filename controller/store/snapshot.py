"""From rows (and what memory knows of beats) to the World that a decision is made on.

What is over does not change any more: ended generations are read once and kept.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.failing import words_of
from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState, NodeState, Reason
from controller.core.world import (
    Checkpoint,
    EndedGeneration,
    Ending,
    Exit,
    Found,
    Generation,
    Job,
    Node,
    Notice,
    SaveCost,
    Seat,
    Slowness,
    World,
)
from controller.store import conduct, history, spares
from controller.store.nodes import GONE
from controller.store.tables import (
    ENDED,
    OVER,
    checkpoints,
    generations,
    jobs,
    nodes,
    orders,
    parts,
    seats,
)
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import Failed, Halted, NonFinite, Paced, Phase

_RECENT_PARTS = 8


@dataclass(frozen=True)
class Sign:
    """The newest sign of life of an incarnation, as memory has it."""

    heard_at: float
    suspect_since: float | None = None
    silences: tuple[tuple[float, float], ...] = ()
    """The newest gaps between two signs of it that were longer than two beats: from, until."""


class Snapshots:
    """Loads worlds; remembers only what can no longer change."""

    def __init__(self) -> None:
        self._past: dict[str, dict[int, EndedGeneration]] = {}

    def load(
        self,
        connection: sa.Connection,
        signs: Mapping[tuple[str, str], Sign],
        grace_until: float,
        started_at: float = 0.0,
    ) -> World:
        """Everything at one moment."""
        rows = connection.execute(
            sa.select(jobs).where(jobs.c.state.not_in(OVER)).order_by(jobs.c.submitted_at)
        ).all()
        ids = [row.id for row in rows]
        self._past = {job: past for job, past in self._past.items() if job in ids}
        self._learn_past(connection, ids)
        current = _current(connection, ids)
        standing = {job: g.number for job, g in current.items() if g.ending}
        saved = _checkpoints(connection, ids, standing)
        saves = _saves(connection, current)
        last_loss = connection.execute(sa.select(sa.func.max(nodes.c.gone_at))).scalar()
        live = _nodes(connection, signs)
        return World(
            nodes=live,
            jobs=tuple(
                _job(
                    row,
                    current.get(row.id),
                    self._past.get(row.id, {}),
                    saved[row.id],
                    saves.get(row.id, (0.0, None)),
                )
                for row in rows
            ),
            grace_until=grace_until,
            last_loss_at=last_loss or 0.0,
            started_at=started_at,
            awaits_agents=any((node.name, node.incarnation) not in signs for node in live),
        )

    def _learn_past(self, connection: sa.Connection, ids: Sequence[str]) -> None:
        known = {job: max(past) for job, past in self._past.items() if past}
        newer = [
            (generations.c.job == job) & (generations.c.number > known.get(job, 0)) for job in ids
        ]
        if not newer:
            return
        ended = (generations.c.state == ENDED) & sa.or_(*newer)
        rows = connection.execute(
            sa.select(generations).where(ended).order_by(generations.c.job, generations.c.number)
        ).all()
        if not rows:
            return
        seated = defaultdict(list)
        for seat in connection.execute(
            sa.select(seats).join(generations).where(ended).order_by(seats.c.rank)
        ):
            seated[seat.job, seat.generation].append(seat)
        for row in rows:
            past = self._past.setdefault(row.job, {})
            past[row.number] = _ended(row, seated[row.job, row.number])


def _nodes(connection: sa.Connection, signs: Mapping[tuple[str, str], Sign]) -> tuple[Node, ...]:
    rows = connection.execute(
        sa.select(nodes).where(nodes.c.state.not_in(GONE)).order_by(nodes.c.name)
    )
    known = conduct.all_of_them(connection)
    return tuple(
        _node(row, signs.get((row.name, row.incarnation)), known.get(row.name)) for row in rows
    )


def _node(row: Any, sign: Sign | None, known: Any | None) -> Node:
    facts = wire.Facts.model_validate(row.facts)
    return Node(
        name=row.name,
        incarnation=row.incarnation,
        state=NodeState(row.state),
        devices=len(facts.devices),
        device_kind=facts.devices[0].kind,
        device_memory_bytes=min(device.memory_bytes for device in facts.devices),
        data_host=facts.data_host,
        store_port=facts.store_port,
        heard_at=max(row.heard_at, sign.heard_at if sign else 0.0),
        suspect_since=sign.suspect_since if sign else None,
        silences=sign.silences if sign else (),
        registered_at=row.registered_at,
        zone=facts.zone,
        slow=Slowness(**row.slow) if row.slow else None,
        notice=_notice(row.notice) if row.notice else None,
        losses=tuple(known.losses) if known else (),
        quarantine=conduct.quarantine_of(known),
        preparation=spares.preparation_of(row),
    )


def _notice(told: Any) -> Notice:
    return Notice(told["kind"], math.inf if told["deadline"] is None else told["deadline"])


def _job(
    row: Any,
    current: Generation | None,
    past: Mapping[int, EndedGeneration],
    saved: Sequence[Checkpoint],
    saves: tuple[float, SaveCost | None],
) -> Job:
    return Job(
        id=row.id,
        name=row.name,
        spec=JobSpec.model_validate(row.spec),
        state=JobState(row.state),
        reason=Reason(row.reason) if row.reason else None,
        message=row.message,
        submitted_at=row.submitted_at,
        cancel_wanted=row.cancel_wanted,
        pause_wanted=row.pause_wanted,
        costs=LayerCosts.model_validate(row.costs) if row.costs else None,
        current=current,
        past=tuple(past[number] for number in sorted(past)),
        checkpoints=tuple(saved),
        waiting_since=row.waiting_since or 0.0,
        save_rate=saves[0],
        save_cost=saves[1],
        trained_since=row.started_at or 0.0,
        saves_fail=row.unsaved is not None,
    )


def _current(connection: sa.Connection, ids: Sequence[str]) -> dict[str, Generation]:
    rows = connection.execute(
        sa.select(generations)
        .where(generations.c.job.in_(ids), generations.c.state != ENDED)
        .order_by(generations.c.number)
    ).all()
    return {row.job: _generation(connection, row) for row in rows}


def _generation(connection: sa.Connection, row: Any) -> Generation:
    seated = history.seats_of(connection, row.job, row.number)
    told = _told(connection, row) if row.still_at else {}
    return Generation(
        number=row.number,
        kind=row.kind or "",
        state=GenerationState(row.state),
        shape=history.shape_of(row.shape),
        cuts=tuple(row.cuts),
        seats=tuple(replace(_seat(seat), **told.get(seat.rank, {})) for seat in seated),
        resumed_from=history.resumed_from(row.resumed_from),
        look_node=row.look_node,
        look_incarnation=row.look_incarnation,
        found=Found(**row.found) if row.found else None,
        created_at=row.created_at,
        launched_at=row.launched_at or 0.0,
        committed=row.committed,
        committed_at=row.committed_at or 0.0,
        because=row.because,
        step_seconds=(
            history.step_seconds(connection, row.job, row.number) if row.committed else 0.0
        ),
        launch_seconds=row.first_step_at - row.launched_at if row.first_step_at else 0.0,
        ending=_ending(row) if row.still_at else None,
        save_every=row.save_every,
        dumped_at=_dumped_at(connection, row) if row.launched_at else 0.0,
        paths=tuple(
            (node, None if unreached is None else tuple(unreached))
            for node, unreached in (row.paths or {}).items()
        ),
    )


def _ending(row: Any) -> Ending:
    reason = Reason(row.end_reason)
    return Ending(reason, row.charged, row.end_because, row.still_at, row.blamed)


def _dumped_at(connection: sa.Connection, row: Any) -> float:
    at = connection.execute(
        sa.select(sa.func.max(orders.c.created_at))
        .where(orders.c.job == row.job, orders.c.generation == row.number)
        .where(orders.c.kind == "dump")
    ).scalar()
    return at or 0.0


def _told(connection: sa.Connection, row: Any) -> dict[int, dict[str, Any]]:
    """Rank -> what it was ordered to do about its state in memory, as fields of its seat."""
    rows = connection.execute(
        sa.select(orders)
        .where(orders.c.job == row.job, orders.c.generation == row.number)
        .where(orders.c.kind.in_(("forward", "save_layers")))
        .order_by(orders.c.number)
    )
    told: dict[int, dict[str, Any]] = defaultdict(dict)
    for order in rows:
        seat = told[order.body["rank"]]
        if order.error:
            seat["refused"] = True
        if order.kind == "forward":
            seat["forwarded_at"] = order.created_at
        else:
            seat["saving"] = (*seat.get("saving", ()), *order.body["layers"])
            seat["saving_at"] = order.created_at
    return told


def _seat(row: Any) -> Seat:
    return Seat(
        rank=row.rank,
        node=row.node,
        incarnation=row.incarnation,
        device=row.device,
        phase=Phase(row.phase) if row.phase else None,
        phase_at=row.phase_at or 0.0,
        applied=row.applied,
        halted=Halted.model_validate(row.halted) if row.halted else None,
        halted_at=row.halted_at or 0.0,
        paces=tuple(Paced.model_validate(paced) for paced in row.paces or ()),
        failed=Failed.model_validate(row.failed) if row.failed else None,
        failed_at=row.failed_at or 0.0,
        stopped=row.stopped or 0,
        refused=row.save_failed is not None,
        non_finite=NonFinite.model_validate(row.non_finite) if row.non_finite else None,
        exit=Exit(**row.exit, at=row.exit_at) if row.exit else None,
    )


def _ended(row: Any, seated: Sequence[Any]) -> EndedGeneration:
    error, tail = words_of([_seat(seat) for seat in seated])
    return EndedGeneration(
        number=row.number,
        kind=row.kind or "",
        resumed_from=history.resumed_from(row.resumed_from),
        committed=row.committed,
        charged=row.charged,
        ended_at=row.ended_at,
        launched=bool(row.launched_at),
        reason=Reason(row.end_reason) if row.end_reason else None,
        because=row.end_because or "",
        shape=history.shape_of(row.shape),
        nodes=tuple(dict.fromkeys((seat.node, seat.incarnation) for seat in seated)),
        blamed=row.blamed,
        error=error,
        tail=tail,
    )


def _saves(
    connection: sa.Connection, current: Mapping[str, Generation]
) -> dict[str, tuple[float, SaveCost | None]]:
    """Job -> bytes a second, and what a periodic save costs: medians of its newest parts."""
    found = {}
    for job, generation in current.items():
        if not generation.is_launched:
            continue
        recent = connection.execute(
            sa.select(parts.c.num_bytes, parts.c.seconds, parts.c.stall_seconds)
            .where(parts.c.job == job, parts.c.seconds > 0, parts.c.num_bytes > 0)
            .order_by(parts.c.at.desc())
            .limit(_RECENT_PARTS)
        ).all()
        if recent:
            rate = float(median(row.num_bytes / row.seconds for row in recent))
            found[job] = rate, _cost(recent)
    return found


def _cost(recent: Sequence[Any]) -> SaveCost | None:
    """Of those that were written beside the training: the others stood still for all of it."""
    beside = [p for p in recent if p.stall_seconds is not None and p.stall_seconds < p.seconds]
    if not beside:
        return None
    stall = median(part.stall_seconds for part in beside)
    write = median(part.seconds for part in beside)
    return SaveCost(float(stall), float(write))


def _checkpoints(
    connection: sa.Connection, ids: Sequence[str], standing: Mapping[str, int]
) -> dict[str, list[Checkpoint]]:
    rows = connection.execute(
        sa.select(checkpoints)
        .where(checkpoints.c.job.in_(ids))
        # What was deleted is of no more use but as a link to a generation that nobody knows.
        .where(checkpoints.c.deleted_at.is_(None) | ~_is_known(checkpoints))
        .order_by(checkpoints.c.step, checkpoints.c.generation)
    )
    saved: dict[str, list[Checkpoint]] = defaultdict(list)
    for row in rows:
        saved[row.job].append(
            Checkpoint(
                folder=row.folder,
                step=row.step,
                generation=row.generation,
                complete=row.complete_at is not None,
                condemned=row.condemned_at is not None or row.deleted_at is not None,
                resumed_from=history.resumed_from(row.resumed_from),
                layers=(
                    _layers(connection, row)
                    if row.generation == standing.get(row.job)
                    else frozenset()
                ),
            )
        )
    return saved


def _is_known(of: sa.Table) -> sa.ColumnElement[bool]:
    """Whether the generation of a row is in the store."""
    same = (generations.c.job == of.c.job) & (generations.c.number == of.c.generation)
    return sa.exists().where(same)


def _layers(connection: sa.Connection, row: Any) -> frozenset[int]:
    written = connection.execute(
        sa.select(parts.c.layers).where(parts.c.job == row.job, parts.c.folder == row.folder)
    ).scalars()
    return frozenset(layer for layers in written for layer in layers)
