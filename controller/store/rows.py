"""Small things that every statement of the store shares."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


class StaleError(Exception):
    """A guarded write changed no row: someone was faster.

    Drop the decision and look again.
    """


def changed(connection: sa.Connection, statement: sa.Update | sa.Delete) -> int:
    """Execute it; how many rows it changed."""
    return connection.execute(statement).rowcount


def guarded(connection: sa.Connection, statement: sa.Update, what: str) -> None:
    """Execute an UPDATE that must hit exactly one row; :class:`StaleError` names ``what`` else."""
    if changed(connection, statement) != 1:
        raise StaleError(f"{what} is no longer as it was")


def insert_new(connection: sa.Connection, table: sa.Table, **values: Any) -> bool:
    """Insert unless a row with this key is there; whether it was new."""
    insert = _dialect(connection).insert(table).values(**values).on_conflict_do_nothing()
    return connection.execute(insert).rowcount == 1


def put(connection: sa.Connection, table: sa.Table, **values: Any) -> None:
    """Insert, or replace the columns given of the row with this key."""
    keys = [column.name for column in table.primary_key]
    insert = _dialect(connection).insert(table).values(**values)
    rest = {name: value for name, value in values.items() if name not in keys}
    connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=rest))


def _dialect(connection: sa.Connection) -> Any:
    return postgresql if connection.dialect.name == "postgresql" else sqlite
