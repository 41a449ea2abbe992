"""what is not finite; what a save costs and how often one is due; a word that nobody read goes"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("seats", sa.Column("non_finite", sa.JSON(), nullable=True))
    op.drop_column("seats", "finished_at")
    op.add_column("parts", sa.Column("stall_seconds", sa.Double(), nullable=True))
    op.add_column("generations", sa.Column("save_every", sa.Double(), nullable=True))
    op.add_column("generations", sa.Column("save_because", sa.Text(), nullable=True))
    op.create_index("ix_events_at", "events", ["at"])


def downgrade() -> None:
    """Back."""
    op.drop_index("ix_events_at", "events")
    op.drop_column("generations", "save_because")
    op.drop_column("generations", "save_every")
    op.drop_column("parts", "stall_seconds")
    op.add_column("seats", sa.Column("finished_at", sa.Double(), nullable=True))
    op.drop_column("seats", "non_finite")
