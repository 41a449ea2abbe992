"""How Alembic reaches the database: the connection that the store hands over, or (from the command
line, for those who write migrations) the one that the settings name.
"""

import sqlalchemy as sa
from alembic import context

from controller.settings import Settings
from controller.store.tables import metadata


def run(connection: sa.Connection) -> None:
    """All migrations in the transaction that is open."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=True,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = sa.create_engine(Settings().database_url)
    with engine.begin() as connection:
        run(connection)
