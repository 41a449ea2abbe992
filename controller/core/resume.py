"""From which checkpoint a job goes on, and which ones are of no more use. PURE.

The lineage's rules are :mod:`trainer.contract.lineage`'s; this room feeds them what the
controller knows of a job's generations.
"""

from collections.abc import Iterator
from itertools import pairwise

from controller.core.world import Checkpoint, Job
from trainer.contract.lineage import counts, lineage, newest_complete
from trainer.contract.spec import ResumedFrom


def newest(job: Job) -> Checkpoint | None:
    """The newest complete checkpoint in the lineage that may be loaded.

    When the program failed twice at the same step from the same checkpoint, one further back.
    """
    spoilt = failed_twice_from(job)
    chain = _chain(job)
    candidates = [c for c in _complete(job) if c.folder != spoilt]
    return newest_complete(candidates, chain) or newest_complete(_complete(job), chain)


def final(job: Job) -> Checkpoint | None:
    """The complete checkpoint of the job's last step, if the lineage has one."""
    found = newest_complete(_complete(job), _chain(job))
    return found if found and found.step >= job.spec.steps else None


def superseded(job: Job) -> tuple[str, ...]:
    """Folders older than the ``keep`` newest complete ones of the lineage: damaged, half-written
    and void ones too, but nothing that may still be written.
    """
    chain = _chain(job)
    kept = sorted((c.step for c in _complete(job) if counts(c, chain)), reverse=True)[
        : job.spec.checkpoint.keep
    ]
    if len(kept) < job.spec.checkpoint.keep:
        return ()
    writing = job.current.number if job.current else None
    return tuple(
        c.folder
        for c in job.checkpoints
        if c.step < kept[-1] and not c.condemned and (c.complete or c.generation != writing)
    )


def failed_twice_from(job: Job) -> str | None:
    """The folder from which the last two launches failed, by the program's fault, at one step."""
    charged = [g for g in job.past if g.launched][-2:]
    for before, last in pairwise(charged):
        same = before.committed == last.committed > 0 and before.resumed_from == last.resumed_from
        if before.charged and last.charged and same and last.resumed_from:
            return last.resumed_from.folder
    return None


def has_trained(job: Job) -> bool:
    """Whether any step was ever committed."""
    return any(step > 0 for _, _, step in _ran(job)) or any(c.step > 0 for c in job.checkpoints)


def _complete(job: Job) -> list[Checkpoint]:
    return [c for c in job.checkpoints if c.complete and not c.condemned]


def _chain(job: Job) -> dict[int, int | None]:
    """The lineage. Only generations that committed a step are links; first weights are where a
    chain may end, and its newest end only while nothing was trained.
    """
    links = {number: link for number, link, step in _ran(job) if step > 0}
    for found in job.checkpoints:
        if found.step > 0:
            links.setdefault(found.generation, found.resumed_from)
    newest_link = max(links, default=None)
    for found in job.checkpoints:
        if found.step == 0:
            links.setdefault(found.generation, None)
    return lineage(links, newest_link)


def _ran(job: Job) -> Iterator[tuple[int, ResumedFrom | None, int]]:
    """(number, what it resumed from, last committed step) of every generation."""
    for past in job.past:
        yield past.number, past.resumed_from, past.committed
    if current := job.current:
        yield current.number, current.resumed_from, current.committed
