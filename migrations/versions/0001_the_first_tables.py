"""the first tables"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "bundles",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_bundles")),
    )
    op.create_table(
        "events",
        sa.Column(
            "seq",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=True),
        sa.Column("node", sa.String(length=64), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job", ["job", "seq"], unique=False)

    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("cancel_wanted", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("costs", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("waiting_since", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_submitted_at", ["submitted_at"], unique=False)
        batch_op.create_index(
            "uq_jobs_unfinished_name",
            ["name"],
            unique=True,
            sqlite_where=sa.text("(state NOT IN ('succeeded', 'failed', 'cancelled'))"),
            postgresql_where=sa.text("(state NOT IN ('succeeded', 'failed', 'cancelled'))"),
        )

    op.create_table(
        "nodes",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("reported", sa.BigInteger(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("heard_at", sa.Double(), nullable=False),
        sa.Column("gone_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", "incarnation", name=op.f("pk_nodes")),
    )
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index(
            "uq_nodes_live_name",
            ["name"],
            unique=True,
            sqlite_where=sa.text("(state NOT IN ('lost', 'evicted'))"),
            postgresql_where=sa.text("(state NOT IN ('lost', 'evicted'))"),
        )

    op.create_table(
        "orders",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_orders")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("orders", schema=None) as batch_op:
        batch_op.create_index("ix_orders_job", ["job", "generation"], unique=False)
        batch_op.create_index(
            "ix_orders_standing",
            ["node", "incarnation"],
            unique=False,
            sqlite_where=sa.text("closed_at IS NULL"),
            postgresql_where=sa.text("closed_at IS NULL"),
        )

    op.create_table(
        "tokens",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_tokens")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("folder", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("resumed_from", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("complete_at", sa.Double(), nullable=True),
        sa.Column("condemned_at", sa.Double(), nullable=True),
        sa.Column("condemned_because", sa.Text(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_checkpoints_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "folder", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "generations",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("shape", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("cuts", sa.JSON(), nullable=False),
        sa.Column("resumed_from", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("look_node", sa.String(length=64), nullable=True),
        sa.Column("look_incarnation", sa.String(length=64), nullable=True),
        sa.Column("look_order", sa.BigInteger(), nullable=True),
        sa.Column("found", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("launched_at", sa.Double(), nullable=True),
        sa.Column("committed", sa.Integer(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("first_step_at", sa.Double(), nullable=True),
        sa.Column("loss_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.String(length=64), nullable=True),
        sa.Column("end_because", sa.Text(), nullable=True),
        sa.Column("charged", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_generations_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_generations")),
    )
    op.create_table(
        "parts",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("folder", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("layer_count", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_parts_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "folder", "rank", name=op.f("pk_parts")),
    )
    op.create_table(
        "recoveries",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("to_generation", sa.Integer(), nullable=False),
        sa.Column("from_generation", sa.Integer(), nullable=False),
        sa.Column("at_step", sa.Integer(), nullable=False),
        sa.Column("resumed_from", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("gap_seconds", sa.Double(), nullable=False),
        sa.Column("phases", sa.JSON(), nullable=False),
        sa.Column("from_shape", sa.String(length=64), nullable=False),
        sa.Column("to_shape", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=True),
        sa.Column("because", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job", "to_generation"],
            ["generations.job", "generations.number"],
            name=op.f("fk_recoveries_job_to_generation_generations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job", "to_generation", name=op.f("pk_recoveries")),
    )
    op.create_table(
        "seats",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("device", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=64), nullable=True),
        sa.Column("phases", sa.JSON(), nullable=False),
        sa.Column("applied", sa.Integer(), nullable=False),
        sa.Column("halted", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("halted_at", sa.Double(), nullable=True),
        sa.Column("failed", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("exit", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("exit_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job", "generation"],
            ["generations.job", "generations.number"],
            name=op.f("fk_seats_job_generation_generations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job", "generation", "rank", name=op.f("pk_seats")),
    )
    with op.batch_alter_table("seats", schema=None) as batch_op:
        batch_op.create_index("ix_seats_node", ["node", "incarnation"], unique=False)

    op.create_table(
        "steps",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("sample_ids_hash", sa.String(length=8), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job", "generation"],
            ["generations.job", "generations.number"],
            name=op.f("fk_steps_job_generation_generations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job", "generation", "step", name=op.f("pk_steps")),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("steps")
    with op.batch_alter_table("seats", schema=None) as batch_op:
        batch_op.drop_index("ix_seats_node")

    op.drop_table("seats")
    op.drop_table("recoveries")
    op.drop_table("parts")
    op.drop_table("generations")
    op.drop_table("checkpoints")
    op.drop_table("tokens")
    with op.batch_alter_table("orders", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_orders_standing",
            sqlite_where=sa.text("closed_at IS NULL"),
            postgresql_where=sa.text("closed_at IS NULL"),
        )
        batch_op.drop_index("ix_orders_job")

    op.drop_table("orders")
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_nodes_live_name",
            sqlite_where=sa.text("(state NOT IN ('lost', 'evicted'))"),
            postgresql_where=sa.text("(state NOT IN ('lost', 'evicted'))"),
        )

    op.drop_table("nodes")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_jobs_unfinished_name",
            sqlite_where=sa.text("(state NOT IN ('succeeded', 'failed', 'cancelled'))"),
            postgresql_where=sa.text("(state NOT IN ('succeeded', 'failed', 'cancelled'))"),
        )
        batch_op.drop_index("ix_jobs_submitted_at")

    op.drop_table("jobs")
    op.drop_table("idempotency")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_job")

    op.drop_table("events")
    op.drop_table("bundles")
