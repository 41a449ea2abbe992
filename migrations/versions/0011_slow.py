"""which nodes are slow"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("nodes", sa.Column("slow", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Back."""
    op.drop_column("nodes", "slow")
