"""what evaluations on held-out samples gave"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "evaluations",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job", "generation"],
            ["generations.job", "generations.number"],
            name=op.f("fk_evaluations_job_generations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job", "generation", "step", name=op.f("pk_evaluations")),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("evaluations")
