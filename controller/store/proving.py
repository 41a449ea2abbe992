"""Steps that were looked at once need not be read again, nor kept one by one.

    reported or found --each there, with the right samples, in order--> proven: one sum a generation
    proven, older than the newest few thousand --------thinned--------> every n-th stays, for curves

A generation's steps are proven up to where nobody goes back to behind it: what its successor went
on from, or its newest whole checkpoint. Steps that several generations did all stay: they are what
the replay is compared by. So do the first and the last of each generation, and all that are wrong
or wait for one that is missing.
"""

from typing import Any

import sqlalchemy as sa

from controller.store import history, ledger
from controller.store.rows import changed
from controller.store.tables import checkpoints, found_steps, generations, jobs, steps
from trainer.contract.samples import hash_of

STEPS_AT_ONCE = 500
_SAMPLES_AT_ONCE = 4096
"""Looked at in one transaction: 20 ms of hashing, for which agents wait."""

WHOLE_STEPS, THIN_STEPS = 10_000, 10_000
"""So many of the newest are kept one by one, and so many at most of all that are older."""


def prove_and_thin(connection: sa.Connection, before: float) -> int:
    """A little, for each job that goes on or has ended since ``before``; how many steps. Call again
    while there are any.
    """
    done = 0
    for job in connection.execute(sa.select(jobs).where(_may_have_more(before))).all():
        links = history.links_of(connection, job.id)
        if links:
            done += _prove(connection, job, links)
            reached = (of.proven.through for of in links if of.proven.through >= of.first)
            proven = max(reached, default=0)
            done += _thin(connection, job.id, min(proven, links[-1].last - WHOLE_STEPS))
    return done


def _may_have_more(before: float) -> sa.ColumnElement[bool]:
    """It goes on, or is over and not proven to its end."""
    later = generations.alias()
    its_last = ~sa.exists().where(
        later.c.job == jobs.c.id, later.c.number > generations.c.number, later.c.committed > 0
    )
    unproven = sa.exists().where(
        generations.c.job == jobs.c.id,
        generations.c.committed > sa.func.coalesce(generations.c.proven_through, 0),
        its_last,
    )
    return jobs.c.finished_at.is_(None) | ((jobs.c.finished_at >= before) & unproven)


def _prove(connection: sa.Connection, job: Any, links: list[history.Link]) -> int:
    at_once = max(1, min(STEPS_AT_ONCE, _SAMPLES_AT_ONCE // job.spec["batch_size"]))
    for link in links:
        begin = link.proven.through + 1
        limit = link.last if link.is_closed or job.finished_at else _saved(connection, job, link)
        if number := _extend(connection, job, link, range(begin, min(limit + 1, begin + at_once))):
            return number
    return 0


def _saved(connection: sa.Connection, job: Any, link: history.Link) -> int:
    """The newest step of ``link`` that a checkpoint holds."""
    newest = connection.execute(
        sa.select(sa.func.max(checkpoints.c.step))
        .where(checkpoints.c.job == job.id, checkpoints.c.generation == link.generation)
        .where(checkpoints.c.complete_at.is_not(None), checkpoints.c.condemned_at.is_(None))
        .where(checkpoints.c.deleted_at.is_(None), checkpoints.c.step <= link.last)
    ).scalar()
    return newest or 0


def _extend(connection: sa.Connection, job: Any, link: history.Link, by: range) -> int:
    """Prove the next steps of ``link``, up to one that is not as it should be; how many."""
    told = ledger.told_of(connection, job, link.generation, by)
    right = []
    for step in by:
        if ledger.what_is_wrong(job, link.generation, step, told.get(step)):
            break
        right.append(told[step])
    if not right:
        return 0
    through = right[-1].step
    hashes = sum(int(row.sample_ids_hash, 16) for row in right)
    connection.execute(
        generations.update()
        .where(generations.c.job == job.id, generations.c.number == link.generation)
        .values(
            proven_through=through,
            proven_hash=hash_of(int(link.proven.hash, 16) + hashes),
            proven_seconds=link.proven.seconds + sum(row.seconds for row in right),
        )
    )
    connection.execute(
        found_steps.delete()
        .where(found_steps.c.job == job.id, found_steps.c.generation == link.generation)
        .where(found_steps.c.step <= through)
    )
    return len(right)


def _thin(connection: sa.Connection, job: str, old: int) -> int:
    """Of the steps up to ``old``."""
    if old <= 0:
        return 0
    before_its_first = sa.func.coalesce(generations.c.resumed_from["step"].as_integer(), 0)
    key = sa.tuple_(steps.c.job, steps.c.generation, steps.c.step)
    some = (
        sa.select(steps.c.job, steps.c.generation, steps.c.step)
        .join(generations)
        .where(steps.c.job == job, steps.c.step <= old)
        .where(steps.c.step % stride_of(old, THIN_STEPS) != 0)
        .where(steps.c.step <= generations.c.proven_through)
        .where(steps.c.step.not_in(ledger.done_again(job).where(steps.c.step <= old)))
        .where(steps.c.step != before_its_first + 1, steps.c.step != generations.c.committed)
        .limit(2 * STEPS_AT_ONCE)
    )
    return changed(connection, steps.delete().where(key.in_(some)))


def stride_of(total: int, most: int) -> int:
    """Every how many-th of ``total`` are ``most`` at most. A power of two: what is thinned with one
    may be thinned again with a greater one.
    """
    return 1 << max(0, -(-total // most) - 1).bit_length()
