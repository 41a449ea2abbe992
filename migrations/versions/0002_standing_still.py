"""standing still: salvage, drain, notices"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column(
        "jobs",
        sa.Column("pause_wanted", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.add_column("nodes", sa.Column("notice", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("generations", sa.Column("still_at", sa.Double(), nullable=True))
    op.add_column("seats", sa.Column("stopped", sa.Integer(), nullable=True))
    op.add_column("seats", sa.Column("save_failed", sa.Text(), nullable=True))
    op.add_column("parts", sa.Column("seconds", sa.Double(), nullable=True))


def downgrade() -> None:
    """Back."""
    for table, column in (
        ("parts", "seconds"),
        ("seats", "save_failed"),
        ("seats", "stopped"),
        ("generations", "still_at"),
        ("nodes", "notice"),
        ("jobs", "pause_wanted"),
    ):
        op.drop_column(table, column)
