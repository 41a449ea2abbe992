"""What has happened, in the order of its becoming durable."""

from typing import Any

import sqlalchemy as sa

from controller.core.events import EventType
from controller.store import tables

MAX_MESSAGE = 2000


def printable(text: str) -> str:
    """Without the one character that PostgreSQL cannot store."""
    return text.replace("\0", "�")


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
            message=printable(message)[:MAX_MESSAGE],
            data=data,
        )
    )
