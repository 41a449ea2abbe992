"""how each rank's tasks go"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("seats", sa.Column("paces", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Back."""
    op.drop_column("seats", "paces")
