"""nodes that are set aside; whom an end is blamed on; when a seat's phase began last"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "conduct",
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("losses", sa.JSON(), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=True),
        sa.Column("until", sa.Double(), nullable=True),
        sa.Column("because", sa.Text(), nullable=True),
        sa.Column("released_at", sa.Double(), nullable=True),
        sa.Column("drilled_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_conduct")),
    )
    op.add_column("generations", sa.Column("blamed", sa.String(length=64), nullable=True))
    op.add_column("generations", sa.Column("paths", sa.JSON(), nullable=True))
    op.add_column("seats", sa.Column("phase_at", sa.Double(), nullable=True))
    op.add_column("seats", sa.Column("failed_at", sa.Double(), nullable=True))


def downgrade() -> None:
    """Back."""
    op.drop_column("seats", "failed_at")
    op.drop_column("seats", "phase_at")
    op.drop_column("generations", "paths")
    op.drop_column("generations", "blamed")
    op.drop_table("conduct")
