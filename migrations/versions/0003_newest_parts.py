"""the newest parts of a job are looked up at every decision"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_index("ix_parts_job", "parts", ["job", "at"])


def downgrade() -> None:
    """Back."""
    op.drop_index("ix_parts_job", "parts")
