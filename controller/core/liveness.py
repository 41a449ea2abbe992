"""Who is alive: from beats, broken order requests, peers' errors and commits. PURE.

Three verdicts, strongest first:

    gone     the incarnation is closed (or this look has just lost it)
    dead     suspect, and its peers' errors say the same: lost at once
    silent   nothing heard and nothing committed for ``lost_after``

A broken order request alone proves nothing: proxies reload, and then many break at once. Commits
are proof of life: no step can commit without every rank, so while any member of a generation
reports new steps no member is dead, however late its agent's beats. One that stays mute for very
long is gone without all the same, at a step that the others agree on (:func:`is_mute`).
"""

from collections.abc import Iterable

from controller.core.states import GenerationState, Reason
from controller.core.words import seconds
from controller.core.world import Generation, Node, Rules, Seat, World
from trainer.contract.progress import ExitCode


def is_answering(node: Node, now: float, rules: Rules) -> bool:
    """Whether it may be given work: beats arrive, and its order request is not broken."""
    if now - node.heard_at > rules.suspect_after:
        return False
    broken = node.suspect_since
    return broken is None or node.heard_at > broken + rules.broken_bound


def is_leaving(node: Node, now: float, rules: Rules) -> bool:
    """Whether it was told that it will be taken, and may still be."""
    return node.notice is not None and now < node.notice.deadline + rules.notice_lapses


def is_silent(
    node: Node, generation: Generation | None, world: World, now: float, rules: Rules
) -> bool:
    """Whether neither it nor any step of its ``generation`` was heard of for too long."""
    heard_at = max(node.heard_at, generation.committed_at if generation else 0.0)
    return now > world.grace_until and now - heard_at > rules.lost_after


def is_mute(node: Node, world: World, now: float, rules: Rules) -> bool:
    """Whether nothing was heard of its agent for very long. Its job may commit steps all the while,
    but nothing that its ranks report or write is known.
    """
    return now > world.grace_until and now - node.heard_at > rules.mute_after


def is_dead(
    node: Node, generation: Generation, world: World, now: float, rules: Rules
) -> str | None:
    """The sentence that convicts it, or None: a suspect whose peers' errors agree.

    A suspect whose own trainer was reported to have exited by itself is not convicted by its peers'
    errors: they follow from that exit. One that left was told to, by an agent that was told to end.
    """
    if node.suspect_since is None and now - node.heard_at <= rules.suspect_after:
        return None
    own = [seat for seat in generation.seats if _sits(seat, node)]
    others = [seat for seat in generation.seats if not _sits(seat, node)]
    if any(seat.exit and seat.exit.code not in (None, ExitCode.LEFT) for seat in own):
        return None
    named_by = _who_names({seat.rank for seat in own}, others)
    broken_at = node.suspect_since
    if broken_at is not None:
        if named_by:
            return f"{named_by.node} lost its link to {node.name}, whose agent has gone away"
        silence = now - max(node.heard_at, broken_at)
        if silence > rules.broken_bound and any(has_broken_link(seat) for seat in others):
            return f"{node.name}'s agent has gone away and its peers' links broke"
        # Inside of a rendezvous nobody's link breaks, and a launch holds nothing: a false alarm
        # costs one. Where nobody else answers either, it is our own network.
        is_launching = generation.state is GenerationState.LAUNCHING
        others_answer = any(is_answering(other, now, rules) for other in world.nodes)
        if silence > rules.broken_bound and is_launching and others_answer:
            return f"{node.name}'s agent has gone away during the launch"
    elif named_by and now > world.grace_until:
        silence_bound = seconds(rules.suspect_after)
        return f"{named_by.node} lost its link to {node.name}, unheard for {silence_bound}"
    return None


def left_with_its_generation(node: Node, world: World, now: float, rules: Rules) -> bool:
    """Whether its agent went away with others' of a generation that ended by a loss: several die
    at once, and the first that is found ends the generation before the others are convicted.
    """
    if node.suspect_since is None:
        return False
    if now - max(node.heard_at, node.suspect_since) <= rules.broken_bound:
        return False
    launched = (g for job in world.jobs for g in job.past if g.launched)
    return any(
        g.reason is Reason.NODE_LOST
        and (node.name, node.incarnation) in g.nodes
        and node.suspect_since > g.ended_at - rules.lost_after
        for g in launched
    )


def has_broken_link(seat: Seat) -> bool:
    """Whether this rank says that a link to a peer broke."""
    if seat.exit is not None and seat.exit.code == ExitCode.PEER_LOST:
        return True
    if seat.failed is not None:
        return seat.failed.code == ExitCode.PEER_LOST
    return seat.halted is not None


def _who_names(ranks: set[int], others: Iterable[Seat]) -> Seat | None:
    """A seat whose error names one of ``ranks``."""
    return next((s for s in others if s.halted and ranks.intersection(s.halted.suspects)), None)


def _sits(seat: Seat, node: Node) -> bool:
    return (seat.node, seat.incarnation) == (node.name, node.incarnation)
