"""Who gets ready for a job without a seat of it, to take one that is lost at once. PURE.

A node is told once, and again only when it was given other work since, or could not (and was set
aside for that). It is ready for one job at a time: while that may use it no other takes it away.
"""

from controller.core.actions import PrepareSpares, SpareAt
from controller.core.look import Look
from controller.core.seating import devices_of
from controller.core.states import JobState
from controller.core.words import listed
from controller.core.world import Generation, Job, Node

_AT_WORK = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)


def to_prepare(look: Look, job: Job, generation: Generation) -> tuple[PrepareSpares, ...]:
    """The order for those of ``job``'s spares that are not ready for it yet. To be asked once its
    launch has come to its first step, and when all other jobs have been served.
    """
    nodes = [node for node in look.pool.spares(job) if _is_idle(look, job, node)]
    if not nodes or generation.kind != "train":
        return ()
    look.ready_for |= {node.name: job.id for node in nodes}
    spares = tuple(SpareAt(n.name, n.incarnation, devices_of(job, n)) for n in nodes)
    verb = "gets" if len(nodes) == 1 else "get"
    because = f"{listed([node.name for node in nodes])} {verb} ready to take a seat that is lost."
    return (PrepareSpares(job.id, generation.number, spares, because),)


def _is_idle(look: Look, job: Job, node: Node) -> bool:
    """Whether it is ready for nobody who may use it."""
    holder = next((j for j in look.world.jobs if j.id == look.ready_for.get(node.name)), None)
    if holder is None or holder.id == job.id:
        return holder is None
    return holder.state not in _AT_WORK or node not in look.pool.spares(holder)
