"""The tables: all that the controller remembers. Loading them again IS restarting it.

Times are seconds of :class:`controller.clock.Clock`, null before the thing has happened. What the
wire and the trainer say is kept in JSON as it was said. A generation's facts hang on
(job, number); a node's on (name, incarnation).
"""

import sqlalchemy as sa

from controller.core.states import GenerationState, JobState, NodeState

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

OVER = [state.value for state in JobState if state.is_over]
ENDED = GenerationState.ENDED.value
_GONE = [s.value for s in NodeState if s.is_gone]

Id = sa.String(64)
Word = sa.String(64)
Number = sa.Integer
Seconds = sa.Double
# SQLite counts rowids in INTEGER columns only.
Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _of_generation() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["job", "generation"], ["generations.job", "generations.number"], ondelete="CASCADE"
    )


jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("name", Word, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("state", Word, nullable=False),
    sa.Column("reason", Word),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("cancel_wanted", sa.Boolean, nullable=False),
    sa.Column("pause_wanted", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("generation", Number, nullable=False),  # the highest number ever given out
    sa.Column("costs", sa.JSON(none_as_null=True)),
    sa.Column("samples", sa.BigInteger),
    sa.Column("submitted_at", Seconds, nullable=False),
    sa.Column("waiting_since", Seconds),
    sa.Column("started_at", Seconds),
    sa.Column("finished_at", Seconds),
    sa.Column("unsaved", sa.JSON(none_as_null=True)),  # {generation, step}: the last save failed
)
unfinished_job_names = sa.Index(
    "uq_jobs_unfinished_name",
    jobs.c.name,
    unique=True,
    sqlite_where=jobs.c.state.not_in(OVER),
    postgresql_where=jobs.c.state.not_in(OVER),
)
sa.Index("ix_jobs_submitted_at", jobs.c.submitted_at)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("name", Word, primary_key=True),
    sa.Column("incarnation", Word, primary_key=True),
    sa.Column("state", Word, nullable=False),
    sa.Column("facts", sa.JSON, nullable=False),
    sa.Column("reported", sa.BigInteger, nullable=False),  # the last durable report
    sa.Column("registered_at", Seconds, nullable=False),
    sa.Column("heard_at", Seconds, nullable=False),  # flushed now and then; memory knows better
    sa.Column("gone_at", Seconds),
    sa.Column("notice", sa.JSON(none_as_null=True)),  # {kind, event, at, deadline or null}
    sa.Column("slow", sa.JSON(none_as_null=True)),  # as controller.core.world.Slowness
    sa.Column("prepared_for", Id),  # the job that it was told to get ready for, without a seat
    sa.Column("prepare_error", sa.Text),
    sa.Column("prepare_failed_at", Seconds),
)
live_node_names = sa.Index(
    "uq_nodes_live_name",
    nodes.c.name,
    unique=True,
    sqlite_where=nodes.c.state.not_in(_GONE),
    postgresql_where=nodes.c.state.not_in(_GONE),
)

# By name, over all incarnations.
conduct = sa.Table(
    "conduct",
    metadata,
    sa.Column("node", Word, primary_key=True),
    sa.Column("losses", sa.JSON, nullable=False),  # when it was lost: the newest few, by time
    sa.Column("times", Number, nullable=False),  # how often it was set aside lately
    sa.Column("since", Seconds),  # it was set aside, or released by somebody
    sa.Column("until", Seconds),
    sa.Column("because", sa.Text),
    sa.Column("released_at", Seconds),
    sa.Column("drilled_at", Seconds),
    sa.Column("unreached", sa.JSON(none_as_null=True)),  # whom it has no path to, if that is why
)

generations = sa.Table(
    "generations",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", Number, primary_key=True),
    sa.Column("kind", Word),
    sa.Column("state", Word, nullable=False),
    sa.Column("shape", sa.JSON(none_as_null=True)),
    sa.Column("cuts", sa.JSON, nullable=False),
    sa.Column("resumed_from", sa.JSON(none_as_null=True)),
    sa.Column("look_node", Word),
    sa.Column("look_incarnation", Word),
    sa.Column("look_order", sa.BigInteger),
    sa.Column("found", sa.JSON(none_as_null=True)),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("created_at", Seconds, nullable=False),
    sa.Column("launched_at", Seconds),
    sa.Column("committed", Number, nullable=False),
    sa.Column("committed_at", Seconds),
    sa.Column("first_step_at", Seconds),
    sa.Column("loss_at", Seconds),  # the first fact of the loss that ended it
    sa.Column("still_at", Seconds),  # standing still was ordered; what follows says by what it ends
    sa.Column("ended_at", Seconds),
    sa.Column("end_reason", Word),
    sa.Column("end_because", sa.Text),
    sa.Column("save_every", Seconds),  # seconds between saves, where the controller finds them out
    sa.Column("save_because", sa.Text),
    sa.Column("charged", sa.Boolean, nullable=False),
    sa.Column("blamed", Word),  # the node at fault, if one alone was
    # Up to this step each was there once with the right samples; of them all: hash and seconds.
    sa.Column("proven_through", Number),
    sa.Column("proven_hash", sa.String(8)),
    sa.Column("proven_seconds", Seconds),
    sa.Column("paths", sa.JSON(none_as_null=True)),  # node -> whom it does not reach; null: unsaid
)

seats = sa.Table(
    "seats",
    metadata,
    sa.Column("job", Id, primary_key=True),
    sa.Column("generation", Number, primary_key=True),
    sa.Column("rank", Number, primary_key=True),
    sa.Column("node", Word, nullable=False),
    sa.Column("incarnation", Word, nullable=False),
    sa.Column("device", Number, nullable=False),
    sa.Column("phase", Word),
    sa.Column("phase_at", Seconds),  # when the phase was last reported
    sa.Column("phases", sa.JSON, nullable=False),  # phase -> when it was first reported
    sa.Column("applied", Number, nullable=False),
    sa.Column("halted", sa.JSON(none_as_null=True)),
    sa.Column("halted_at", Seconds),
    sa.Column("failed", sa.JSON(none_as_null=True)),
    sa.Column("failed_at", Seconds),
    sa.Column("stopped", Number),  # the step that it stopped after, as ordered
    sa.Column("paces", sa.JSON(none_as_null=True)),  # its newest few windows of steps
    sa.Column("save_failed", sa.Text),  # why it could not write its share while standing still
    sa.Column("exit", sa.JSON(none_as_null=True)),
    sa.Column("exit_at", Seconds),
    sa.Column("non_finite", sa.JSON(none_as_null=True)),  # what it saw, as it said it
    _of_generation(),
)
sa.Index("ix_seats_node", seats.c.node, seats.c.incarnation)

orders = sa.Table(
    "orders",
    metadata,
    sa.Column("number", Serial, primary_key=True, autoincrement=True),
    sa.Column("node", Word, nullable=False),
    sa.Column("incarnation", Word, nullable=False),
    sa.Column("job", Id, nullable=False),
    sa.Column("generation", Number, nullable=False),
    sa.Column("kind", Word, nullable=False),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Column("created_at", Seconds, nullable=False),
    sa.Column("closed_at", Seconds),  # carried out, failed, or withdrawn
    sa.Column("error", sa.Text),
    sqlite_autoincrement=True,
)
sa.Index(
    "ix_orders_standing",
    orders.c.node,
    orders.c.incarnation,
    sqlite_where=orders.c.closed_at.is_(None),
    postgresql_where=orders.c.closed_at.is_(None),
)
sa.Index("ix_orders_job", orders.c.job, orders.c.generation)

steps = sa.Table(
    "steps",
    metadata,
    sa.Column("job", Id, primary_key=True),
    sa.Column("generation", Number, primary_key=True),
    sa.Column("step", Number, primary_key=True),
    sa.Column("at", Seconds, nullable=False),
    sa.Column("loss", Seconds),
    sa.Column("grad_norm", Seconds),
    sa.Column("samples", Number, nullable=False),
    sa.Column("sample_ids_hash", sa.String(8), nullable=False),
    sa.Column("seconds", Seconds, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    _of_generation(),
)
sa.Index("ix_steps_job", steps.c.job, steps.c.step)

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("job", Id, primary_key=True),
    sa.Column("generation", Number, primary_key=True),
    sa.Column("step", Number, primary_key=True),
    sa.Column("at", Seconds, nullable=False),
    sa.Column("loss", Seconds),
    sa.Column("samples", sa.BigInteger, nullable=False),
    sa.Column("seconds", Seconds, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    _of_generation(),
)

# Steps that no report told of, as a part of a checkpoint does; every agent that knew was killed.
found_steps = sa.Table(
    "found_steps",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", Number, primary_key=True),
    sa.Column("step", Number, primary_key=True),
    sa.Column("samples", Number, nullable=False),
    sa.Column("sample_ids_hash", sa.String(8), nullable=False),
)

# A folder may be found whose generation this store never knew, hence no foreign key to generations.
parts = sa.Table(
    "parts",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("folder", Word, primary_key=True),
    sa.Column("rank", Number, primary_key=True),
    sa.Column("layers", sa.JSON, nullable=False),
    sa.Column("layer_count", Number, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("seconds", Seconds),  # that writing it took; null when it was found
    sa.Column("stall_seconds", Seconds),  # that training stood still for it
    sa.Column("at", Seconds, nullable=False),
)
sa.Index("ix_parts_job", parts.c.job, parts.c.at)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("folder", Word, primary_key=True),
    sa.Column("step", Number, nullable=False),
    sa.Column("generation", Number, nullable=False),
    sa.Column("resumed_from", sa.JSON(none_as_null=True)),  # of the generation that wrote it
    sa.Column("complete_at", Seconds),
    sa.Column("condemned_at", Seconds),
    sa.Column("condemned_because", sa.Text),
    sa.Column("deleted_at", Seconds),  # the deletion was ordered
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", Serial, primary_key=True, autoincrement=True),
    sa.Column("at", Seconds, nullable=False),
    sa.Column("type", Word, nullable=False),
    sa.Column("job", Id),
    sa.Column("node", Word),
    sa.Column("generation", Number),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sqlite_autoincrement=True,
)
sa.Index("ix_events_job", events.c.job, events.c.seq)
sa.Index("ix_events_at", events.c.at)

recoveries = sa.Table(
    "recoveries",
    metadata,
    sa.Column("job", Id, primary_key=True),
    sa.Column("to_generation", Number, primary_key=True),
    sa.Column("from_generation", Number, nullable=False),
    sa.Column("at_step", Number, nullable=False),
    sa.Column("resumed_from", Number, nullable=False),
    sa.Column("began_at", Seconds, nullable=False),
    sa.Column("ended_at", Seconds, nullable=False),
    sa.Column("gap_seconds", Seconds, nullable=False),
    sa.Column("phases", sa.JSON, nullable=False),
    sa.Column("from_shape", Word, nullable=False),
    sa.Column("to_shape", Word, nullable=False),
    sa.Column("reason", Word),
    sa.Column("because", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(
        ["job", "to_generation"], ["generations.job", "generations.number"], ondelete="CASCADE"
    ),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("hash", sa.String(64), primary_key=True),  # SHA-256 of the whole token
    sa.Column("role", Word, nullable=False),
    sa.Column("label", Word, nullable=False),
    sa.Column("created_at", Seconds, nullable=False),
    sa.Column("expires_at", Seconds),
)

bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("digest", sa.String(71), primary_key=True),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", Seconds, nullable=False),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("body_hash", sa.String(64), nullable=False),
    sa.Column("job", Id, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
    sa.Column("created_at", Seconds, nullable=False),
)
