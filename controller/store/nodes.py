"""Nodes and their incarnations: coming up, being heard, and the orders that wait for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.core.states import NodeState
from controller.store import conduct, events
from controller.store.tables import nodes, orders, seats

GONE = [state.value for state in NodeState if state.is_gone]


class UnknownIncarnationError(Exception):
    """This incarnation is not the live one of its name: it must register (again)."""


def register(connection: sa.Connection, asked: wire.Register, at: float) -> int:
    """Take the incarnation in, closing older ones of its name; its last durable report.

    Never refused. One that was given up and comes back by the same name and incarnation was only
    cut off: it is taken back.
    """
    _close_older(connection, asked, at)
    here = (nodes.c.name == asked.node) & (nodes.c.incarnation == asked.incarnation)
    facts = asked.facts.model_dump(mode="json")
    known = connection.execute(sa.select(nodes).where(here)).one_or_none()
    if known is None:
        connection.execute(
            nodes.insert().values(
                name=asked.node,
                incarnation=asked.incarnation,
                state=NodeState.JOINING.value,
                facts=facts,
                reported=0,
                registered_at=at,
                heard_at=at,
            )
        )
    else:
        back = {"state": NodeState.JOINING.value, "gone_at": None} if known.gone_at else {}
        connection.execute(nodes.update().where(here).values(facts=facts, heard_at=at, **back))
    if known is None or known.gone_at:
        devices = f"{len(asked.facts.devices)} x {asked.facts.devices[0].kind}"
        how = f"is back ({devices})" if known else f"joined ({devices})"
        events.record(
            connection, at, EventType.NODE_JOINED, f"{asked.node} {how}.", node=asked.node
        )
    return int(known.reported) if known else 0


def _close_older(connection: sa.Connection, asked: wire.Register, at: float) -> None:
    alive = (
        (nodes.c.name == asked.node)
        & (nodes.c.incarnation != asked.incarnation)
        & nodes.c.state.not_in(GONE)
    )
    older = connection.execute(sa.select(nodes.c.notice).where(alive)).scalars().all()
    connection.execute(nodes.update().where(alive).values(state=NodeState.LOST.value, gone_at=at))
    connection.execute(  # nobody is left to carry them out
        orders.update()
        .where(orders.c.node == asked.node, orders.c.incarnation != asked.incarnation)
        .where(orders.c.closed_at.is_(None))
        .values(closed_at=at)
    )
    if older:
        if None in older:  # who was told to go is not to blame
            conduct.lost(connection, asked.node, at)
        message = f"{asked.node} was started again; what ran there before is lost."
        events.record(connection, at, EventType.NODE_LOST, message, node=asked.node)


def reported(connection: sa.Connection, node: str, incarnation: str) -> int:
    """The last durable report of a live incarnation, else :class:`UnknownIncarnationError`."""
    found = connection.execute(
        sa.select(nodes.c.reported).where(
            nodes.c.name == node, nodes.c.incarnation == incarnation, nodes.c.state.not_in(GONE)
        )
    ).scalar()
    if found is None:
        raise UnknownIncarnationError(f"{node} is not known by incarnation {incarnation}")
    return int(found)


def take_notice(
    connection: sa.Connection, node: str, incarnation: str, noticed: wire.Noticed, at: float
) -> None:
    """It was told that it will be taken. Of several notices the newest counts."""
    told = {"kind": noticed.notice, "event": noticed.event, "at": at,
            "deadline": at + noticed.seconds_left}  # fmt: skip
    connection.execute(
        nodes.update()
        .where(nodes.c.name == node, nodes.c.incarnation == incarnation)
        .values(notice=told)
    )
    message = f"{node} was told that it will be taken in {noticed.seconds_left:.0f} s"
    message += f" ({noticed.notice})."
    events.record(connection, at, EventType.NODE_NOTICED, message, node=node, notice=told)


def withdraw_notice(
    connection: sa.Connection, node: str, incarnation: str, event: str, at: float
) -> None:
    """It was told so no longer: it stays, unless somebody else wants it gone."""
    here = (nodes.c.name == node) & (nodes.c.incarnation == incarnation)
    told = connection.execute(sa.select(nodes.c.notice).where(here)).scalar()
    if told and told["event"] == event:
        connection.execute(nodes.update().where(here).values(notice=None))
        message = f"{node} will not be taken after all ({told['kind']})."
        events.record(connection, at, EventType.NODE_NOTICE_WITHDRAWN, message, node=node)


def drain(
    connection: sa.Connection, node: str, by: str, at: float, *, wanted: bool
) -> tuple[str, str] | None:
    """Have the live node of this name emptied, or used again; its key, or None: there is none."""
    live = (nodes.c.name == node) & nodes.c.state.not_in(GONE)
    row = connection.execute(sa.select(nodes).where(live)).one_or_none()
    if row is None:
        return None
    if wanted != (row.notice is not None):
        told = {"kind": "drain", "event": "", "at": at, "deadline": None} if wanted else None
        connection.execute(nodes.update().where(live).values(notice=told))
        type_ = EventType.NODE_DRAIN_ASKED if wanted else EventType.NODE_DRAIN_UNDONE
        what = "to be emptied" if wanted else "to be used again"
        events.record(connection, at, type_, f"{node} is {what}, asked for by {by}.", node=node)
    return row.name, row.incarnation


def flush_heard(connection: sa.Connection, heard: Mapping[tuple[str, str], float]) -> None:
    """Write down when nodes were last heard, in one go."""
    if heard:
        connection.execute(
            nodes.update()
            .where(nodes.c.name == sa.bindparam("node"), nodes.c.incarnation == sa.bindparam("of"))
            .values(heard_at=sa.bindparam("at")),
            [{"node": node, "of": of, "at": at} for (node, of), at in heard.items()],
        )


# ---- orders


def give_order(
    connection: sa.Connection,
    node: str,
    incarnation: str,
    job: str,
    generation: int,
    body: wire.OrderBody,
    at: float,
) -> int:
    """Write down a standing order; its number."""
    key = connection.execute(
        orders.insert().values(
            node=node,
            incarnation=incarnation,
            job=job,
            generation=generation,
            kind=body.kind,
            body=body.model_dump(mode="json"),
            created_at=at,
        )
    ).inserted_primary_key
    assert key
    return int(key[0])


def standing_orders(
    connection: sa.Connection, node: str, incarnation: str, after: int
) -> tuple[wire.Order, ...]:
    """The node's standing orders above ``after``, by number."""
    rows = connection.execute(
        sa.select(orders.c.number, orders.c.body)
        .where(orders.c.node == node, orders.c.incarnation == incarnation)
        .where(orders.c.closed_at.is_(None), orders.c.number > after)
        .order_by(orders.c.number)
    )
    return tuple(wire.Order.model_validate({"number": r.number, "body": r.body}) for r in rows)


def holds_seat(
    connection: sa.Connection, node: str, incarnation: str, job: str, generation: int, rank: int
) -> bool:
    """Whether that rank was given to this incarnation."""
    found = connection.execute(
        sa.select(seats.c.rank).where(
            seats.c.job == job,
            seats.c.generation == generation,
            seats.c.rank == rank,
            seats.c.node == node,
            seats.c.incarnation == incarnation,
        )
    )
    return found.first() is not None


def live_nodes(connection: sa.Connection) -> Sequence[Any]:
    """The rows of incarnations that are not gone."""
    return connection.execute(sa.select(nodes).where(nodes.c.state.not_in(GONE))).all()
