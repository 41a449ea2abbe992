"""What is remembered of a node by its name, over all its incarnations: when it was lost, and
whether it is set aside. Facts and decisions are written here; what they lead to is
:mod:`controller.core.quarantine`'s affair.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from controller.core.actions import QuarantineNode
from controller.core.events import EventType
from controller.core.world import Quarantine
from controller.store import events
from controller.store.rows import put
from controller.store.tables import conduct

_LOSSES_KEPT = 16
_DRILL_SECONDS = 30.0
"""A loss so soon after a drill that takes the node is none of its own."""


def all_of_them(connection: sa.Connection) -> dict[str, Any]:
    """Name -> row, of those of whom there is something to remember."""
    return {row.node: row for row in connection.execute(sa.select(conduct))}


def quarantine_of(row: Any | None) -> Quarantine | None:
    """The last one of a name."""
    if row is None or row.until is None:
        return None
    return Quarantine(
        because=row.because,
        since=row.since,
        until=row.until,
        times=row.times,
        is_over=row.released_at is not None,
        unreached=tuple(row.unreached or ()),
    )


def lost(connection: sa.Connection, node: str, at: float) -> None:
    """It went away without a notice."""
    row = _row(connection, node)
    if row and row.drilled_at is not None and at - row.drilled_at < _DRILL_SECONDS:
        return
    losses = sorted([*(row.losses if row else ()), at])[-_LOSSES_KEPT:]
    put(connection, conduct, node=node, losses=losses, times=row.times if row else 0)


def drilled(connection: sa.Connection, names: Iterable[str], at: float) -> None:
    """They are about to be taken by a drill."""
    for node in names:
        row = _row(connection, node)
        put(connection, conduct, node=node, losses=row.losses if row else [],
            times=row.times if row else 0, drilled_at=at)  # fmt: skip


def set_aside(connection: sa.Connection, verdict: QuarantineNode, at: float) -> None:
    """Nobody who has enough others uses it until then."""
    node, until, because = verdict.node, verdict.until, verdict.because
    row = _row(connection, node)
    put(connection, conduct, node=node, losses=row.losses if row else [], times=verdict.times,
        since=at, until=until, because=because, released_at=None,
        unreached=list(verdict.unreached) or None)  # fmt: skip
    events.record(connection, at, EventType.NODE_QUARANTINED, because, node=node, until=until)


def served(connection: sa.Connection, node: str, because: str, at: float) -> None:
    """Its time is over."""
    connection.execute(conduct.update().where(conduct.c.node == node).values(released_at=at))
    events.record(connection, at, EventType.NODE_RELEASED, because, node=node)


def release(connection: sa.Connection, node: str, by: str, at: float) -> bool:
    """Let it be used again before its time, with a clean record; False: it is not set aside."""
    row = _row(connection, node)
    if row is None or row.until is None or row.released_at is not None:
        return False
    put(connection, conduct, node=node, losses=[], times=0, since=at, until=at, released_at=at)
    message = f"{node} may be used again, asked for by {by}."
    events.record(connection, at, EventType.NODE_RELEASED, message, node=node)
    return True


def _row(connection: sa.Connection, node: str) -> Any | None:
    return connection.execute(sa.select(conduct).where(conduct.c.node == node)).one_or_none()
