"""Why a healthy generation should stop after a common step: pause, notice, an agent that has gone
mute, room to grow. PURE.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.core import salvage
from controller.core.assign import choice_for, problem_of
from controller.core.liveness import is_leaving
from controller.core.look import Look
from controller.core.seating import NOBODY, Slow, slow_among
from controller.core.states import GenerationState, Reason
from controller.core.words import count, listed, seconds, times
from controller.core.world import Generation, Job, Node, Rules
from controller.planner.choose import Choice, planner_of
from controller.planner.entry import paces_by_rank
from controller.planner.moving import Losses, Stay, weigh


@dataclass(frozen=True)
class Wish:
    """``because`` is the cause, a sentence's first half."""

    reason: Reason
    because: str


def wish_of(look: Look, job: Job, generation: Generation) -> Wish | None:
    """What the user or a cloud wants of it."""
    if job.pause_wanted:
        return Wish(Reason.USER, "Paused by the user")
    leaving = [n for n in look.seated(generation) if is_leaving(n, look.now, look.rules)]
    if leaving:
        names = listed([node.name for node in leaving])
        return Wish(Reason.EVICTION, f"{names} {'was' if len(leaving) == 1 else 'were'} told to go")
    if mute := look.mute(generation):
        names, silence = listed([node.name for node in mute]), seconds(look.rules.mute_after)
        because = f"{names} {'has' if len(mute) == 1 else 'have'} not answered for {silence}"
        return Wish(Reason.NODE_LOST, f"{because} though the job goes on")
    return _sparing_the_slow(look, job, generation)


def _sparing_the_slow(look: Look, job: Job, generation: Generation) -> Wish | None:
    """A slow node holds all others up, or one that was slow has less to do than it could: another
    plan makes steps enough faster.
    """
    seated = look.seated(generation)
    slow = slow_among(seated)
    again = [n for n in seated if n.slow and (n.slow.over_at or 0.0) > generation.launched_at]
    if not slow and not again:
        return None
    if _a_gain(look, job, generation, look.pool.offer(job)) is None:
        return None
    if not slow:
        names = listed([node.name for node in again])
        return Wish(Reason.STRAGGLER, f"{names} {_is(again)} as fast as the others again")
    (name, _), factor = max(slow.items(), key=lambda one: one[1])
    return Wish(Reason.STRAGGLER, f"{name} is slow: {factor:.2f}× what its stage usually takes")


def time_left(look: Look, job: Job, generation: Generation) -> float:
    """Seconds until the first of its nodes may be taken, less what saving takes."""
    told = [n.notice.deadline for n in look.seated(generation) if n.notice is not None]
    saving = salvage.predicted_seconds(job, len(generation.seats))
    return min(told, default=float("inf")) - look.rules.notice_margin - saving - look.now


def drain_bound(job: Job, generation: Generation, rules: Rules) -> float:
    """Seconds that stopping after a common step, and saving it, may take."""
    saving = salvage.predicted_seconds(job, 1)
    return max(rules.drain_deadline, 3 * (generation.step_seconds + saving))


def room_to_grow(look: Look, job: Job, generation: Generation) -> Wish | None:
    """Nodes that are free would make its steps enough faster, and joining has settled. To be asked
    when all other jobs have been served.
    """
    nodes = look.pool.offer(job)
    others = [n for n in nodes if (n.name, n.incarnation) not in generation.nodes]
    spares = [n for n in others if not look.pool.is_aside(n)]
    since = max([generation.launched_at, *(_joined_at(n, look.rules) for n in spares)])
    if not spares or look.now < since + job.spec.plan.settle:
        return None
    if (gained := _a_gain(look, job, generation, nodes)) is None:
        return None
    choice, gain = gained
    more = f"{count(len(spares), 'more VM')}: {times(choice.shape)} is estimated"
    faster = f"{gain:.0%} faster than {times(generation.shape)}"
    return Wish(Reason.SCALE_UP, f"{more} {faster}")


def _a_gain(
    look: Look, job: Job, generation: Generation, nodes: Sequence[Node]
) -> tuple[Choice, float] | None:
    """The choice for ``nodes``, and the part of a step's time that it saves; None: a move to it
    does not pay.
    """
    if not _may_be_stopped(look, job, generation):
        return None
    slow = slow_among((*nodes, *look.seated(generation)))
    choice = choice_for(job, nodes, slow)
    if not isinstance(choice, Choice):
        return None
    found = weigh(
        estimated_seconds(job, generation, nodes, slow),
        choice.seconds,
        min_gain=job.spec.plan.min_gain,
        move_seconds=move_seconds(job, generation, look.rules),
        seconds_left=(job.spec.steps - generation.committed) * generation.step_seconds,
        losses=losses_of(job, look.now),
    )
    return None if isinstance(found, Stay) else (choice, found.gain)


def move_seconds(job: Job, generation: Generation, rules: Rules) -> float:
    """What a move takes: saving, and a launch like the one before."""
    launch = generation.launch_seconds or rules.move_seconds
    return launch + salvage.predicted_seconds(job, len(generation.seats))


def losses_of(job: Job, now: float) -> Losses:
    """The stops that losses have brought it."""
    ended = (Reason.NODE_LOST, Reason.EVICTION)
    stops = sum(g.reason in ended and g.committed > 0 for g in job.past)
    return Losses(stops, now - job.submitted_at)


def _may_be_stopped(look: Look, job: Job, generation: Generation) -> bool:
    """Whether it trains, and may stop for what is merely better: all of it answers, and nothing
    says that the step it stops after cannot be saved. Else what is not saved would be lost.
    """
    trains = generation.state is GenerationState.RUNNING and generation.kind == "train"
    return trains and not (job.saves_fail or look.suspects(generation))


def _joined_at(node: Node, rules: Rules) -> float:
    """Since when it counts as there: one that was lost must first stay a while."""
    return max([node.registered_at, *(at + rules.quarantine for at in node.losses[-1:])])


def estimated_seconds(
    job: Job, generation: Generation, nodes: Sequence[Node], slow: Slow = NOBODY
) -> float:
    """A step of its shape on who holds it, played as a choice for ``nodes`` is."""
    shape = generation.shape
    assert shape is not None
    problem = replace(problem_of(job, nodes), micro_batch=shape.micro_batch)
    factors = [slow.get((seat.node, seat.incarnation), 1.0) for seat in generation.seats]
    paces = paces_by_rank(shape, factors)
    return planner_of(problem).seconds(shape, generation.cuts, paces)


def _is(nodes: Sequence[Node]) -> str:
    return "is" if len(nodes) == 1 else "are"
