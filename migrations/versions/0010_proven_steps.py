"""steps that are proven are kept as a sum"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("generations", sa.Column("proven_through", sa.Integer(), nullable=True))
    op.add_column("generations", sa.Column("proven_hash", sa.String(length=8), nullable=True))
    op.add_column("generations", sa.Column("proven_seconds", sa.Double(), nullable=True))
    op.create_index("ix_steps_job", "steps", ["job", "step"])


def downgrade() -> None:
    """Back."""
    op.drop_index("ix_steps_job", table_name="steps")
    op.drop_column("generations", "proven_seconds")
    op.drop_column("generations", "proven_hash")
    op.drop_column("generations", "proven_through")
