"""Checkpoint folders as they are known: parts that writers reported, or that a listing found."""

import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.store import events, saves
from controller.store.nodes import GONE
from controller.store.rows import changed, insert_new, put
from controller.store.tables import (
    ENDED,
    checkpoints,
    found_steps,
    generations,
    nodes,
    orders,
    parts,
    steps,
)
from trainer.contract import progress
from trainer.contract.checkpoints import FolderName
from trainer.contract.spec import ResumedFrom


def take_part(
    connection: sa.Connection,
    job: str,
    part: progress.PartWritten | wire.PartFound,
    generation: int,
    rank: int,
    begun: ResumedFrom | None,
    at: float,
) -> None:
    """One durable part: reported by its writer (a survivor's may grow), or found in the folder."""
    values = {"layers": list(part.layers), "layer_count": part.layer_count,
              "num_bytes": part.num_bytes}  # fmt: skip
    if isinstance(part, progress.PartWritten):
        put(connection, parts, job=job, folder=part.folder, rank=rank, at=at,
            seconds=part.seconds, stall_seconds=part.stall_seconds, **values)  # fmt: skip
    else:
        insert_new(connection, parts, job=job, folder=part.folder, rank=rank, at=at, **values)
        _take_steps(connection, job, part)
    insert_new(
        connection, checkpoints, job=job, folder=part.folder, step=part.step,
        generation=generation, resumed_from=begun.model_dump(mode="json") if begun else None,
    )  # fmt: skip
    _weigh(connection, job, part.folder, at)


def _take_steps(connection: sa.Connection, job: str, part: wire.PartFound) -> None:
    """What it says was committed and nobody has reported, past what is proven."""
    if not part.committed:
        return
    proven = connection.execute(
        sa.select(generations.c.proven_through).where(
            generations.c.job == job, generations.c.number == part.generation
        )
    ).scalar()
    told = sa.select(steps.c.step).where(
        steps.c.job == job,
        steps.c.generation == part.generation,
        steps.c.step >= part.committed[0].step,
    )
    known = set(connection.execute(told).scalars())
    for one in part.committed:
        if one.step not in known and one.step > (proven or 0):
            insert_new(
                connection, found_steps, job=job, generation=part.generation, step=one.step,
                samples=one.samples, sample_ids_hash=one.sample_ids_hash,
            )  # fmt: skip


def _weigh(connection: sa.Connection, job: str, folder: str, at: float) -> None:
    """Complete = the parts cover every layer."""
    rows = connection.execute(
        sa.select(parts).where(parts.c.job == job, parts.c.folder == folder)
    ).all()
    covered = {layer for row in rows for layer in row.layers}
    complete = bool(rows) and len(covered) == rows[0].layer_count
    this = (checkpoints.c.job == job) & (checkpoints.c.folder == folder)
    if not complete:
        connection.execute(checkpoints.update().where(this).values(complete_at=None))
    elif changed(
        connection,
        checkpoints.update()
        .where(this, checkpoints.c.complete_at.is_(None))
        .values(complete_at=at),
    ):
        size = sum(row.num_bytes for row in rows)
        named = FolderName.parse(folder)
        if named:
            saves.succeeded(connection, job, named)
        message = f"Checkpoint {folder} is complete ({size / 2**20:.1f} MB)."
        events.record(
            connection, at, EventType.CHECKPOINT_COMPLETE, message, job=job,
            generation=named.generation if named else None, folder=folder, size_bytes=size,
        )  # fmt: skip


def complete(connection: sa.Connection, job: str) -> dict[int, str]:
    """Step -> folder of the complete checkpoints that are known, the newest of each."""
    rows = connection.execute(
        sa.select(checkpoints.c.step, checkpoints.c.folder)
        .where(checkpoints.c.job == job, checkpoints.c.complete_at.is_not(None))
        .where(checkpoints.c.condemned_at.is_(None), checkpoints.c.deleted_at.is_(None))
        .order_by(checkpoints.c.generation)
    )
    return {row.step: row.folder for row in rows}


def take_listing(connection: sa.Connection, looked: wire.Looked, at: float) -> None:
    """The folder as it was when the Look was carried out; what is gone from it is forgotten.

    A folder with nothing at all in it, where this job has written, is another one: a disk that is
    not mounted on that node, say. It condemns nothing, as one that cannot be read.
    """
    order = connection.execute(
        sa.select(orders).where(orders.c.number == looked.number, orders.c.kind == "look")
    ).one_or_none()
    if order is None or order.job != looked.job:
        return
    error = looked.error
    if error is None and _is_bare(looked) and _known(connection, looked.job, order.created_at):
        error = "it is empty there, though this job has written into it; is it mounted?"
    connection.execute(
        orders.update()
        .where(orders.c.number == looked.number, orders.c.closed_at.is_(None))
        .values(closed_at=at, error=events.printable(error) if error else None)
    )
    if error is None:
        _take_back(connection, looked, order.created_at)
        for part in looked.parts:
            take_part(connection, looked.job, part, part.generation, part.rank, _begun(part), at)
        _forget_missing(connection, looked, order.created_at, at)
    numbers = [part.generation for part in looked.parts] + [m.generation for m in looked.markers]
    newest = max([looked.newest_generation, *numbers])  # damaged ones too: they never come back
    connection.execute(
        generations.update()
        .where(generations.c.job == looked.job, generations.c.look_order == looked.number)
        .where(generations.c.state != ENDED)
        .values(found={"newest_marker": newest, "error": error, "at": at})
    )


def _is_bare(looked: wire.Looked) -> bool:
    """Whether it has not even a marker, and those are never deleted."""
    return not (looked.parts or looked.markers or looked.newest_generation)


def _known(connection: sa.Connection, job: str, before: float) -> set[tuple[str, int]]:
    """Folder and rank of each part that was known then."""
    known = sa.select(parts.c.folder, parts.c.rank).where(parts.c.job == job, parts.c.at < before)
    return {(row.folder, row.rank) for row in connection.execute(known)}


def _begun(part: wire.PartFound) -> ResumedFrom | None:
    if part.resumed_from is None or part.resumed_from_generation is None:
        return None
    step, generation = part.resumed_from, part.resumed_from_generation
    return ResumedFrom(step=step, generation=generation, folder=str(FolderName(step, generation)))


def _take_back(connection: sa.Connection, looked: wire.Looked, ordered_at: float) -> None:
    """Checkpoints that were to be deleted and are still there: who was told is gone, or refused.

    They count again, and will be deleted anew if they are still superseded.
    """
    orders_out = sa.select(orders.c.body).join(
        nodes, (nodes.c.name == orders.c.node) & (nodes.c.incarnation == orders.c.incarnation)
    ).where(
        orders.c.job == looked.job, orders.c.kind == "delete", orders.c.closed_at.is_(None),
        nodes.c.state.not_in(GONE),
    )  # fmt: skip
    going = {name for body in connection.execute(orders_out).scalars() for name in body["folders"]}
    there = {part.folder for part in looked.parts} - going
    connection.execute(
        checkpoints.update()
        .where(checkpoints.c.job == looked.job, checkpoints.c.folder.in_(there))
        .where(checkpoints.c.deleted_at < ordered_at)
        .values(deleted_at=None)
    )


def _forget_missing(
    connection: sa.Connection, looked: wire.Looked, ordered_at: float, at: float
) -> None:
    """Parts that were known when the Look was ordered and are not there now."""
    found = {(part.folder, part.rank) for part in looked.parts}
    missing = _known(connection, looked.job, ordered_at) - found
    for folder, rank in missing:
        connection.execute(
            parts.delete().where(
                parts.c.job == looked.job, parts.c.folder == folder, parts.c.rank == rank
            )
        )
    for folder in sorted({folder for folder, _ in missing}):
        counted = _counts(connection, looked.job, folder)
        _weigh(connection, looked.job, folder, at)
        if counted and not _counts(connection, looked.job, folder):
            message = f"Checkpoint {folder} is not used: {_what_is_wrong(looked, folder)}."
            events.record(
                connection, at, EventType.CHECKPOINT_SKIPPED, message, job=looked.job,
                generation=looked.generation, folder=folder,
            )  # fmt: skip


def _counts(connection: sa.Connection, job: str, folder: str) -> bool:
    row = connection.execute(
        sa.select(checkpoints).where(checkpoints.c.job == job, checkpoints.c.folder == folder)
    ).one()
    return row.complete_at is not None and row.deleted_at is None and row.condemned_at is None


def _what_is_wrong(looked: wire.Looked, folder: str) -> str:
    """The files by their names."""
    wrong = [
        f"{file.path.removeprefix(folder + '/')} {file.reason}"
        for file in looked.skipped
        if file.path.startswith(f"{folder}/")
    ]
    if wrong:
        return "; ".join(wrong)
    is_there = any(part.folder == folder for part in looked.parts)
    return "some of its parts are gone" if is_there else "it is gone from the folder"
