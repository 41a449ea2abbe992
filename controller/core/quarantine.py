"""Which nodes are set aside though they are alive: those that come and go, those on which alone a
program fails, and spares that cannot get ready for a job that runs elsewhere. PURE.

Each swing of such a node would cost all others a restart. It is set aside for a while that doubles
with each time, and says why; then it gets another chance. Who is set aside is offered to nobody who
has enough others; what runs there goes on.

Rather than wait below its fewest nodes a job uses such a node as a last resort
(:func:`last_resorts`), but not where that could only fail: beside one that it has no path to, or
where the job's program failed on it alone when it last sat there. That would cost a start, and in
the end the job's restarts, and train nothing.

A program that fails wherever it sits is not a node's fault: after each failure that one node is
blamed for, the seats are dealt anew (:func:`turned`), so that only a node that fails in whatever
seat is blamed twice in a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from controller.core.actions import QuarantineNode, ReleaseNode
from controller.core.words import count, seconds
from controller.core.world import EndedGeneration, Job, Node, Rules, World

T = TypeVar("T")


def is_set_aside(node: Node, now: float) -> bool:
    """Whether it may not be used now."""
    return node.quarantine is not None and now < node.quarantine.until


def verdicts(world: World, now: float, rules: Rules) -> Iterator[QuarantineNode | ReleaseNode]:
    """Whom to set aside, and who has served the time."""
    for node in world.nodes:
        if is_set_aside(node, now):
            continue
        if why := _why(node, world, now, rules):
            yield set_aside(node, why, now, rules)
        elif node.quarantine and not node.quarantine.is_over:
            yield ReleaseNode(node.name, f"{node.name} is no longer set aside.")


def set_aside(
    node: Node, why: str, now: float, rules: Rules, unreached: Sequence[str] = ()
) -> QuarantineNode:
    """For a while that doubles with each time, unless the last time is long ago."""
    last = node.quarantine
    is_recent = last is not None and now < last.until + rules.quarantine_cap
    times = last.times + 1 if last and is_recent else 1
    span = min(rules.quarantine_cap, rules.quarantine * 2 ** min(times - 1, 30))
    because = f"{why}; set aside for {seconds(span)}."
    return QuarantineNode(node.name, now + span, times, because, tuple(unreached))


def last_resorts(
    job: Job, aside: Iterable[Node], others: Iterable[Node], jobs: Sequence[Job]
) -> list[Node]:
    """Of those that are set ``aside``, whom ``job`` may use beside ``others`` when those are too
    few; the best first: who was set aside least often, and is let in again soonest. Last comes who
    failed alone under another of ``jobs``, or has no path to somebody who is not among ``others``.
    """

    def rank(node: Node) -> tuple[bool, int, float]:
        assert node.quarantine is not None
        is_bad = bool(node.quarantine.unreached) or any(fails_on(other, node) for other in jobs)
        return is_bad, node.quarantine.times, node.quarantine.until

    found: list[Node] = []
    beside = [node.name for node in others]
    for node in sorted((node for node in aside if not fails_on(job, node)), key=rank):
        if not (_unreached(node) & set(beside) or any(node.name in _unreached(n) for n in found)):
            found.append(node)
            beside.append(node.name)
    return found


def fails_on(job: Job, node: Node) -> bool:
    """Whether ``job``'s last launch on ``node`` ended by the fault of that node alone, or it could
    not get ready for one.
    """
    spare = node.preparation
    if spare and spare.job == job.id and spare.error:
        return True
    last = next((g for g in reversed(job.past) if node.name in dict(g.nodes)), None)
    return last is not None and last.blamed == node.name


def _unreached(node: Node) -> set[str]:
    return set(node.quarantine.unreached) if node.quarantine else set()


def _why(node: Node, world: World, now: float, rules: Rules) -> str | None:
    """What it has done since it was last set aside or released."""
    since = node.quarantine.since if node.quarantine else 0.0
    lost = [at for at in node.losses if at > max(since, now - rules.flap_window)]
    if len(lost) >= rules.flaps:
        return f"{node.name} was lost {count(len(lost), 'time')} in {seconds(rules.flap_window)}"
    spare = node.preparation
    if spare and spare.error and spare.failed_at > since:
        return f"{node.name} could not get ready for a seat: {spare.error.rstrip('.')}"
    for job in world.jobs:
        failed = failures_alone(job.past, node.name, since)
        if failed >= rules.failures_alone:
            times = count(failed, "time")
            return f"{job.name} failed {times} in a row on {node.name} and on no other VM"
    return None


def failures_alone(past: Sequence[EndedGeneration], node: str, since: float = 0.0) -> int:
    """How many launches in a row, up to the last, ended by ``node``'s fault after ``since``."""
    times = 0
    for g in reversed([g for g in past if g.launched]):
        if g.blamed != node or g.ended_at <= since:
            break
        times += 1
    return times


def turned(past: Sequence[EndedGeneration], nodes: Sequence[T]) -> tuple[T, ...]:
    """``nodes`` in the order in which seats are dealt: one further round for each failure in a row
    that one node was blamed for.
    """
    blamed = 0
    for g in reversed([g for g in past if g.launched]):
        if g.blamed is None:
            break
        blamed += 1
    by = blamed % len(nodes) if nodes else 0
    return (*nodes[by:], *nodes[:by])
