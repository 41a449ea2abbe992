"""Which nodes reach each other, as they said before a launch. Facts only."""

import sqlalchemy as sa

from agent import wire
from controller.store.tables import generations, orders


def take_paths(connection: sa.Connection, node: str, connected: wire.Connected, at: float) -> None:
    """``node`` says whom it does not reach."""
    asked = (orders.c.number == connected.number) & (orders.c.kind == "connect")
    order = connection.execute(sa.select(orders).where(asked, orders.c.node == node)).one_or_none()
    if order is None:
        return
    connection.execute(orders.update().where(asked).values(closed_at=at))
    here = (generations.c.job == order.job) & (generations.c.number == order.generation)
    paths = connection.execute(sa.select(generations.c.paths).where(here)).scalar() or {}
    said = {**paths, node: list(connected.unreached)}
    connection.execute(generations.update().where(here).values(paths=said))
