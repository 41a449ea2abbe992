"""Which nodes are set aside though they are alive: those that come and go, and those on which
alone a program fails. PURE.

Each swing of such a node would cost all others a restart. It is set aside for a while that doubles
with each time, and says why; then it gets another chance. Who is set aside is offered to nobody;
what runs there goes on.

A program that fails wherever it sits is not a node's fault: after each failure that one node is
blamed for, the seats are dealt anew (:func:`turned`), so that only a node that fails in whatever
seat is blamed twice in a row.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from controller.core.actions import QuarantineNode, ReleaseNode
from controller.core.words import count, seconds
from controller.core.world import EndedGeneration, Node, Rules, World

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


def set_aside(node: Node, why: str, now: float, rules: Rules) -> QuarantineNode:
    """For a while that doubles with each time, unless the last time is long ago."""
    last = node.quarantine
    is_recent = last is not None and now < last.until + rules.quarantine_cap
    times = last.times + 1 if last and is_recent else 1
    span = min(rules.quarantine_cap, rules.quarantine * 2 ** min(times - 1, 30))
    because = f"{why}; set aside for {seconds(span)}."
    return QuarantineNode(node.name, now + span, times, because)


def _why(node: Node, world: World, now: float, rules: Rules) -> str | None:
    """What it has done since it was last set aside or released."""
    since = node.quarantine.since if node.quarantine else 0.0
    lost = [at for at in node.losses if at > max(since, now - rules.flap_window)]
    if len(lost) >= rules.flaps:
        return f"{node.name} was lost {count(len(lost), 'time')} in {seconds(rules.flap_window)}"
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
