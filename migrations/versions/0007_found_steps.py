"""steps that only a checkpoint tells of"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "found_steps",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("sample_ids_hash", sa.String(length=8), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_found_steps_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "generation", "step", name=op.f("pk_found_steps")),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("found_steps")
