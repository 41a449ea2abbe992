"""whom a node that is set aside has no path to; whether a job's last save failed"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("conduct", sa.Column("unreached", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("jobs", sa.Column("unsaved", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Back."""
    op.drop_column("jobs", "unsaved")
    op.drop_column("conduct", "unreached")
