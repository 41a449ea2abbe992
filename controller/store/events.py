"""What has happened, in the order of its becoming durable."""

from typing import Any

import sqlalchemy as sa

from controller.core.events import EventType
from controller.store import tables


def record(
    connection: sa.Connection,
    at: float,
    type_: EventType,
    message: str,
    *,
    job: str | None = None,
    node: str | None = None,
    generation: int | None = None,
    **data: Any,
) -> None:
    """Add one event; ``message`` is the sentence that a person reads."""
    connection.execute(
        tables.events.insert().values(
            at=at,
            type=type_.value,
            job=job,
            node=node,
            generation=generation,
            message=message.replace("\0", "�"),
            data=data,
        )
    )
