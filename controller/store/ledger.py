"""The proof that a job's training is one training, worked out from what every step reported,
or, where all who knew were killed, from what its checkpoint says of it. Of steps that were proven
before (:mod:`controller.store.proving`) the sum is enough.

Each once: the lineage's steps follow on each other, and the samples that were consumed hash to what
(seed, number of samples) give for that step. Replayed: a step that a later generation did again
took the same samples and gave the same loss, but for the rounding of another shape's sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from controller.core.states import JobState
from controller.store import history
from controller.store.tables import found_steps, steps
from trainer.contract.samples import expected_hash, hash_of


@dataclass(frozen=True)
class Range:
    """Steps ``first`` .. ``last`` of the lineage, all of one generation."""

    generation: int
    first: int
    last: int
    samples: int
    hash: str
    """Of all samples that these steps consumed: the sum of the steps' own."""


@dataclass(frozen=True)
class Replay:
    """What was done more than once, compared."""

    steps: int = 0
    """So many steps were committed by more than one generation."""
    max_difference: float = 0.0
    """Of a step's losses, the greatest."""
    at_step: int | None = None
    """Where that is."""
    mismatch: int | None = None
    """The first step that took other samples, or was finite only once; None: there is none."""


@dataclass(frozen=True)
class Ledger:
    """Whether each step of the lineage was committed once, with the right samples."""

    steps: int
    ranges: Sequence[Range]
    replay: Replay
    gap_at: int | None = None
    gap: str = ""


def ledger_of(connection: sa.Connection, job: Any) -> Ledger:
    """Check the lineage's steps against the permutation; ``job`` is its row."""
    ranges: list[Range] = []
    done, wrong = 0, None
    for link in history.links_of(connection, job.id):
        found, gap = _range(connection, job, link)
        if link.first != done + 1:
            gap = done + 1, f"generation {link.generation} begins at step {link.first}"
        ranges.append(found)
        wrong = wrong or gap
        done = link.last
    if wrong is None and job.state == JobState.SUCCEEDED and done != job.spec["steps"]:
        wrong = done + 1, f"the job is done after {done} steps"
    return Ledger(done, ranges, replay_of(connection, job.id), *(wrong or ()))


def _range(
    connection: sa.Connection, job: Any, link: history.Link
) -> tuple[Range, tuple[int, str] | None]:
    """What the steps of ``link`` have consumed, and the first that is wrong."""
    proven = proven_of(connection, job, link)
    rest = range(proven.through + 1, link.last + 1)
    told = told_of(connection, job, link.generation, rest)
    total = hash_of(
        int(proven.hash, 16) + sum(int(row.sample_ids_hash, 16) for row in told.values())
    )
    samples = job.spec["batch_size"] * (proven.through + 1 - link.first)
    samples += sum(row.samples for row in told.values())
    found = Range(link.generation, link.first, link.last, samples, total)
    wrong = ((step, what_is_wrong(job, link.generation, step, told.get(step))) for step in rest)
    return found, next(((step, what) for step, what in wrong if what), None)


def proven_of(connection: sa.Connection, job: Any, link: history.Link) -> history.Proven:
    """What is proven of ``link``. Where a later generation went on from further back than what was
    proven, as it does when a checkpoint turned out to be spoilt, without the steps past that.
    """
    proven = link.proven
    if proven.through <= link.last:
        return proven
    void = range(link.last + 1, proven.through + 1)
    hashes = sum(int(_right_hash(job, step), 16) for step in void)
    seconds = seconds_of(connection, job.id, link.generation, void)
    return history.Proven(
        link.last, hash_of(int(proven.hash, 16) - hashes), max(0.0, proven.seconds - seconds)
    )


def told_of(connection: sa.Connection, job: Any, generation: int, of: range) -> Mapping[int, Any]:
    """Step -> what was reported of it, or else found."""
    if not of:
        return {}
    seconds = {steps: steps.c.seconds, found_steps: sa.literal(0.0).label("seconds")}
    return {
        row.step: row
        for table in (found_steps, steps)  # what was reported counts before what was found
        for row in connection.execute(
            sa.select(table.c.step, table.c.samples, table.c.sample_ids_hash, seconds[table])
            .where(table.c.job == job.id, table.c.generation == generation)
            .where(table.c.step.between(of[0], of[-1]))
        )
    }


def seconds_of(connection: sa.Connection, job: str, generation: int, of: range) -> float:
    """What these steps took together."""
    if not of:
        return 0.0
    total = connection.execute(
        sa.select(sa.func.sum(steps.c.seconds))
        .where(steps.c.job == job, steps.c.generation == generation)
        .where(steps.c.step.between(of[0], of[-1]))
    ).scalar()
    return float(total or 0.0)


def what_is_wrong(job: Any, generation: int, step: int, told: Any | None) -> str:
    """With a step of which this was ``told``; empty: it is as it should be."""
    batch_size = job.spec["batch_size"]
    if told is None:
        return f"no report of it came from generation {generation}"
    if told.samples != batch_size:
        return f"it took {told.samples} samples instead of {batch_size}"
    right = _right_hash(job, step)
    if told.sample_ids_hash != right:
        return f"its samples hash to {told.sample_ids_hash} instead of {right}"
    return ""


def _right_hash(job: Any, step: int) -> str:
    if not job.samples:
        return ""
    return _expected_hash(step, job.spec["batch_size"], job.samples, job.spec.get("seed", 0))


# A ledger is asked for again and again while its job runs; each step is worked out once.
_expected_hash = lru_cache(maxsize=1 << 14)(expected_hash)


def replay_of(connection: sa.Connection, job: str) -> Replay:
    """Compare what several generations say of the same step."""
    often = sa.func.count()
    rows = connection.execute(
        sa.select(
            steps.c.step,
            often.label("times"),
            sa.func.count(steps.c.loss).label("finite"),
            sa.func.min(steps.c.loss).label("least"),
            sa.func.max(steps.c.loss).label("most"),
            sa.func.count(sa.distinct(steps.c.sample_ids_hash)).label("hashes"),
        )
        .where(steps.c.job == job, steps.c.step.in_(done_again(job)))
        .group_by(steps.c.step)
        .order_by(steps.c.step)
    ).all()
    differ = [(row.most - row.least, row.step) for row in rows if row.finite == row.times]
    odd = (row.step for row in rows if row.hashes > 1 or row.finite not in (0, row.times))
    greatest, at = max(differ, default=(0.0, None), key=lambda pair: pair[0])
    return Replay(len(rows), greatest, at, next(odd, None))


def done_again(job: str) -> sa.Select[tuple[int]]:
    """The steps that more than one generation has committed."""
    return (
        sa.select(steps.c.step)
        .where(steps.c.job == job)
        .group_by(steps.c.step)
        .having(sa.func.count() > 1)
    )
