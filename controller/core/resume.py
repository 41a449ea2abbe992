"""From which checkpoint a job goes on, and which ones are of no more use. PURE.

The lineage's rules are :mod:`trainer.contract.lineage`'s; this room feeds them what the
controller knows of a job's generations.
"""

from controller.core.failing import same_in_a_row
from controller.core.states import Reason
from controller.core.world import Checkpoint, EndedGeneration, Generation, Job
from trainer.contract.lineage import counts, lineage_of, newest_complete

UNREADABLE_TRIES = 3
"""A checkpoint that listings find whole and that cannot be read so many times in a row is passed
over, once; nothing condemns it.
"""


def newest(job: Job) -> Checkpoint | None:
    """The newest complete checkpoint in the lineage that may be loaded.

    When it has failed twice in the same way, or could not be read again and again, one further back
    than was loaded last.
    """
    spoilt = (failed_twice_from(job), unreadable(job))
    chain = _chain(job)
    candidates = [c for c in _complete(job) if c.folder not in spoilt]
    return newest_complete(candidates, chain) or newest_complete(_complete(job), chain)


def final(job: Job) -> Checkpoint | None:
    """The complete checkpoint of the job's last step, if the lineage has one."""
    found = newest_complete(_complete(job), _chain(job))
    return found if found and found.step >= job.spec.steps else None


def superseded(job: Job) -> tuple[str, ...]:
    """Folders older than the ``keep`` newest complete ones of the lineage: half-written and void
    ones too, but nothing that may still be written. What was condemned stays, as evidence.
    """
    chain = _chain(job)
    steps = sorted((c.step for c in _complete(job) if counts(c, chain)), reverse=True)
    if len(steps) < job.spec.checkpoint.keep:
        return ()
    oldest_kept = steps[job.spec.checkpoint.keep - 1]
    writing = job.current.number if job.current else None
    return tuple(
        c.folder
        for c in job.checkpoints
        if c.step < oldest_kept and not c.condemned and (c.complete or c.generation != writing)
    )


def failed_twice_from(job: Job) -> str | None:
    """The folder that the last launch loaded, when it and one before failed in the same way."""
    same = same_in_a_row(job.past)
    if len(same) < 2 or same[-1].resumed_from is None:
        return None
    return same[-1].resumed_from.folder


def unreadable(job: Job) -> str | None:
    """The folder that none of the last launches could read, though each listing saw it whole: the
    disk is broken under one of its files, say.
    """
    last = [g for g in job.past if g.launched][-UNREADABLE_TRIES:]
    loaded = [
        g.resumed_from.folder
        for g in last
        if g.reason is Reason.CHECKPOINT_UNREACHABLE and not g.committed and g.resumed_from
    ]
    return loaded[0] if len(loaded) == UNREADABLE_TRIES and len(set(loaded)) == 1 else None


def has_trained(job: Job) -> bool:
    """Whether any step was ever committed."""
    return any(g.committed > 0 for g in job.past) or any(c.step > 0 for c in job.checkpoints)


def _complete(job: Job) -> list[Checkpoint]:
    return [c for c in job.checkpoints if c.complete and not c.condemned]


def _chain(job: Job) -> dict[int, int | None]:
    """The lineage."""
    ran: list[EndedGeneration | Generation] = [*job.past, *([job.current] if job.current else [])]
    return lineage_of(ran, job.checkpoints)
