"""Nodes that get ready for a seat which they do not hold: what they were told, what became of it,
and the end of it with their job.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.core.world import Preparation
from controller.store import events
from controller.store.nodes import give_order
from controller.store.rows import changed
from controller.store.tables import nodes, orders, seats

NodeKey = tuple[str, str]
"""(name, incarnation)."""
_NONE = {"prepared_for": None, "prepare_error": None, "prepare_failed_at": None}


def preparation_of(row: Any) -> Preparation | None:
    """The newest of a node."""
    if row.prepared_for is None:
        return None
    return Preparation(row.prepared_for, row.prepare_error, row.prepare_failed_at or 0.0)


def told(connection: sa.Connection, key: NodeKey, job: str) -> None:
    """It was ordered to get ready for ``job``."""
    connection.execute(_update(key).values(**_NONE | {"prepared_for": job}))


def seated(connection: sa.Connection, keys: Iterable[NodeKey]) -> None:
    """They are no spares any more: what they were told is of no more use to know."""
    for key in set(keys):
        connection.execute(_update(key).values(**_NONE))


def answered(connection: sa.Connection, order: Any, error: str | None, at: float) -> None:
    """A node is ready, or says why it cannot be. Nothing, when it was told other things since."""
    key, cause = (order.node, order.incarnation), error and events.printable(error)
    still = _update(key).where(nodes.c.prepared_for == order.job)
    if error is not None:
        connection.execute(still.values(prepare_error=cause, prepare_failed_at=at))
    elif changed(connection, still.values(prepare_error=None)):
        message = f"{order.node} is ready to take a seat."
        events.record(connection, at, EventType.NODE_PREPARED, message, job=order.job,
                      node=order.node, generation=order.generation)  # fmt: skip


def release(
    connection: sa.Connection, job: str, generation: int, root: str, at: float
) -> set[NodeKey]:
    """``job`` is over: who may have kept something warm for it, or was saving into ``root``, lets
    go. Whom to tell.
    """
    connection.execute(
        orders.update()
        .where(orders.c.job == job, orders.c.kind == "prepare", orders.c.closed_at.is_(None))
        .values(closed_at=at)
    )
    held = sa.exists().where(
        seats.c.job == job, seats.c.node == nodes.c.name,
        seats.c.incarnation == nodes.c.incarnation,
    )  # fmt: skip
    keys = connection.execute(
        sa.select(nodes.c.name, nodes.c.incarnation)
        .where(nodes.c.gone_at.is_(None), sa.or_(held, nodes.c.prepared_for == job))
    ).all()  # fmt: skip
    body = wire.Release(job=job, generation=generation, root=root)
    for name, incarnation in keys:
        give_order(connection, name, incarnation, job, generation, body, at)
    connection.execute(nodes.update().where(nodes.c.prepared_for == job).values(**_NONE))
    return {(name, incarnation) for name, incarnation in keys}


def _update(key: NodeKey) -> sa.Update:
    return nodes.update().where(nodes.c.name == key[0], nodes.c.incarnation == key[1])
