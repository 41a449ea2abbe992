"""spares that get ready for a job"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("nodes", sa.Column("prepared_for", sa.String(64), nullable=True))
    op.add_column("nodes", sa.Column("prepare_error", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("prepare_failed_at", sa.Double(), nullable=True))


def downgrade() -> None:
    """Back."""
    for name in ("prepare_failed_at", "prepare_error", "prepared_for"):
        op.drop_column("nodes", name)
