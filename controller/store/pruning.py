"""What is of no more use goes, a little at a time; never what a proof or a lineage hangs on.

    after ``keep_days`` (a setting)
        events, closed orders, answers to repeated submissions, parts of deleted checkpoints
        incarnations that are gone and held no seat; what is remembered of a node by its name
    at once
        deleted checkpoints that no link hangs on
        steps that are proven and not among the newest: all but every n-th, and their sum stays

Generations, seats, recoveries and evaluations stay, all of them: they are the proof.
"""

import sqlalchemy as sa

from controller.store.nodes import GONE
from controller.store.proving import prove_and_thin
from controller.store.rows import changed
from controller.store.tables import (
    checkpoints,
    conduct,
    events,
    generations,
    idempotency,
    nodes,
    orders,
    parts,
    seats,
)

AT_ONCE = 500
"""Rows of one kind in one transaction: agents wait no longer than for that."""


def prune(connection: sa.Connection, before: float) -> int:
    """Delete some of what was done with before ``before``; how many rows. Call again while there
    are any.
    """
    return sum(
        [
            _orders(connection, before),
            _events(connection, before),
            _parts(connection, before),
            _checkpoints(connection),
            _nodes(connection, before),
            _conduct(connection, before),
            _answers(connection, before),
            prove_and_thin(connection, before),
        ]
    )


def _some(table: sa.Table, key: sa.ColumnElement[object], *of: sa.ColumnElement[bool]) -> sa.Delete:
    return table.delete().where(key.in_(sa.select(key).where(*of).limit(AT_ONCE)))


def _orders(connection: sa.Connection, before: float) -> int:
    """Those of generations that go on stay: they tell what its ranks were ordered."""
    going_on = sa.exists().where(
        generations.c.job == orders.c.job,
        generations.c.number == orders.c.generation,
        generations.c.ended_at.is_(None),
    )
    done = orders.c.closed_at < before
    return changed(connection, _some(orders, orders.c.number, done, ~going_on))


def _events(connection: sa.Connection, before: float) -> int:
    """The newest stays: numbers go on from it."""
    newest = sa.select(sa.func.max(events.c.seq)).scalar_subquery()
    old = events.c.at < before
    return changed(connection, _some(events, events.c.seq, old, events.c.seq < newest))


def _parts(connection: sa.Connection, before: float) -> int:
    deleted = sa.exists().where(
        checkpoints.c.job == parts.c.job,
        checkpoints.c.folder == parts.c.folder,
        checkpoints.c.deleted_at < before,
    )
    some = sa.select(parts.c.job, parts.c.folder, parts.c.rank).where(deleted).limit(AT_ONCE)
    keys = connection.execute(some).all()
    return sum(
        changed(
            connection,
            parts.delete().where(
                parts.c.job == key.job, parts.c.folder == key.folder, parts.c.rank == key.rank
            ),
        )
        for key in keys
    )


def _checkpoints(connection: sa.Connection) -> int:
    """Of deleted ones without parts, those whose writer is known by itself: no link hangs on them.

    The listing that takes a deletion back brings them anew.
    """
    known = sa.exists().where(
        generations.c.job == checkpoints.c.job,
        generations.c.number == checkpoints.c.generation,
        generations.c.committed > 0,
    )
    has_parts = sa.exists().where(
        parts.c.job == checkpoints.c.job, parts.c.folder == checkpoints.c.folder
    )
    some = (
        sa.select(checkpoints.c.job, checkpoints.c.folder)
        .where(checkpoints.c.deleted_at.is_not(None), known, ~has_parts)
        .limit(AT_ONCE)
    )
    return sum(
        changed(
            connection,
            checkpoints.delete().where(
                checkpoints.c.job == key.job, checkpoints.c.folder == key.folder
            ),
        )
        for key in connection.execute(some).all()
    )


def _nodes(connection: sa.Connection, before: float) -> int:
    """Gone incarnations that held no seat of anything that is remembered."""
    held = sa.exists().where(
        seats.c.node == nodes.c.name, seats.c.incarnation == nodes.c.incarnation
    )
    gone = nodes.c.state.in_(GONE) & (nodes.c.gone_at < before)
    return changed(connection, _some(nodes, nodes.c.incarnation, gone, ~held))


def _conduct(connection: sa.Connection, before: float) -> int:
    """Of nodes of which nobody had anything to say since."""
    times = (conduct.c.since, conduct.c.until, conduct.c.released_at, conduct.c.drilled_at)
    quiet = [sa.func.coalesce(at, 0.0) < before for at in times]
    rows = connection.execute(
        sa.select(conduct.c.node, conduct.c.losses).where(*quiet).limit(AT_ONCE)
    ).all()
    gone = [row.node for row in rows if max(row.losses, default=0.0) < before]
    return changed(connection, conduct.delete().where(conduct.c.node.in_(gone))) if gone else 0


def _answers(connection: sa.Connection, before: float) -> int:
    old = idempotency.c.created_at < before
    return changed(connection, _some(idempotency, idempotency.c.key, old))
