"""What should happen next: the one decision point. PURE.

    reconcile(world, now, rules) -> decisions, each with the sentence that says why

A look ends in at most one decision a job, and deciding again after they are recorded is quiet (with
several jobs after a few looks: what one gives back changes what another may have; and a node may be
set aside for what was decided). A job's road:

    none -----> planned ------> launching ------> running ------> none: succeeded
     ^          a number,       seats are         a step is
     |          a listing       given out         committed
     |            |                |                  |---> halted: survivors save what they hold
     +------------+----------------+------------------+-------+
       a loss, a fault, a deadline: ended, and what follows is said in the same decision

Nothing is remembered here: a new controller loads the world and goes on.
"""

from collections.abc import Iterable

from controller.core import paths, resume
from controller.core.actions import (
    Decision,
    DeleteCheckpoints,
    DumpStacks,
    Launch,
    LearnCosts,
    MarkNode,
    MarkSlow,
    MoveGeneration,
    QuarantineNode,
    ReleaseNode,
    SaveEvery,
)
from controller.core.assign import by_turn, choice_for, micro_batch_of
from controller.core.budget import strain
from controller.core.ending import Actions, close, end, follow, hold, say, succeed, take_up
from controller.core.failing import of_not_finite
from controller.core.faults import Fault, fault_of
from controller.core.hangs import Hang, hang_of
from controller.core.learning import learned
from controller.core.look import Look
from controller.core.period import has_moved, period_of
from controller.core.quarantine import set_aside, turned
from controller.core.seating import in_seating_order, probing_seats, seats, slow_among
from controller.core.spares import to_prepare
from controller.core.standstill import (
    drain,
    drained,
    find_who_hangs,
    not_finite,
    rescue,
    stop_by,
)
from controller.core.states import GenerationState, JobState, Reason
from controller.core.story import (
    because_of,
    last_resorts_of,
    launch_sentence,
    loss_of,
    spared,
)
from controller.core.stragglers import verdicts
from controller.core.wishes import room_to_grow, wish_of
from controller.core.words import count, listed, seconds, times
from controller.core.world import Checkpoint, Generation, Job, Node, Rules, World
from controller.planner.choose import Choice, NoPlan
from trainer.contract.progress import Phase
from trainer.contract.spec import ResumedFrom, Shape

SETTLE_AT_MOST = 5
"""A start waits for joining nodes no longer than so many times ``settle``."""


def reconcile(world: World, now: float, rules: Rules) -> tuple[Decision, ...]:
    """Say how to bring every job closer to running on the nodes that answer."""
    look = Look(world, now, rules)
    lost = _about_nodes(look.lost_idle_nodes())
    aside = _about_nodes(look.quarantines())
    paces = _about_nodes(verdicts(look.pool.alive.values(), world.jobs, now, rules))
    decided = {job.id: _about(look, job) for job in by_turn(world.jobs)}
    for job in world.jobs:
        if decided[job.id] is None:
            decided[job.id] = _go_on(look, job)
    jobs = [Decision(id_, done, because_of(done)) for id_, done in decided.items() if done]
    return (*lost, *aside, *paces, *jobs, *_about_nodes(look.settled_nodes()))


def _about_nodes(
    marks: Iterable[MarkNode | QuarantineNode | ReleaseNode | MarkSlow],
) -> list[Decision]:
    return [Decision(None, (mark,), mark.because) for mark in marks]


def _about(look: Look, job: Job) -> Actions | None:
    """What to do about ``job``; None: its generation goes on, and what there is to say of it is
    said when all others have been served.
    """
    if job.state.is_over:
        return ()
    if job.cancel_wanted:
        return close(look, job, JobState.CANCELLED, Reason.USER, "Cancelled by the user.")
    if job.state is JobState.PAUSED:
        return () if job.pause_wanted else take_up(look, job)
    if job.current is None:
        return follow(look, job)
    if job.current.is_launched:
        return _watch(look, job, job.current)
    return _prepare(look, job, job.current)


# --- A planned generation: listing, settling, launch -------------------------------------------


def _prepare(look: Look, job: Job, planned: Generation) -> Actions:
    """Launch, when the folder is listed and losses and joins have settled."""
    nodes = look.pool.offer(job)
    look.pool.take(job, nodes)
    if look.is_gathering(job):
        return ()
    if job.pause_wanted:
        return end(look, job, Fault(Reason.USER, False, "Paused before it was launched"))
    if fault := _listing_fault(look, planned, nodes):
        above = planned.found.newest_marker if planned.found else 0
        return end(look, job, fault, above)
    if len(nodes) < job.spec.nodes.min:
        if look.pool.could_answer(job) >= job.spec.nodes.min:
            return ()
        return end(look, job, Fault(Reason.NODE_LOST, False, "VMs were lost before the launch"))
    if planned.found is None or not _has_settled(look, job, nodes):
        return ()
    is_late = look.now > planned.created_at + look.rules.connect_deadline
    if not (is_late or paths.are_told(planned.paths, nodes)):
        return ()
    if bad := paths.worst(planned.paths, nodes):
        return _leave_out(look, job, *bad)
    found = resume.newest(job)
    if found and found.step >= job.spec.steps:
        return succeed(look, job, found)
    if found is None and resume.has_trained(job):
        return _nothing_to_load(look, job, planned)
    choice = choice_for(job, nodes, slow_among(nodes))
    if isinstance(choice, NoPlan):  # better a slow node than none
        choice = choice_for(job, nodes)
    if found is None or choice is None:
        return _launch_first_weights(look, job, planned, nodes)
    if isinstance(choice, Choice):
        return _launch(look, job, planned, nodes, choice, found)
    return end(look, job, Fault(Reason.NO_PLAN_FITS, False, choice.because))


def _leave_out(look: Look, job: Job, node: Node, unreached: list[str]) -> Actions:
    """``node`` does not reach others: launch without it, or say that too few are left."""
    why = paths.because(node, unreached)
    aside = set_aside(node, why, look.now, look.rules, unreached)
    look.pool.set_aside(aside)
    if look.pool.could_answer(job) >= job.spec.nodes.min:
        return (aside,)
    because = f"{why}, and too few VMs are left without it"
    return aside, *end(look, job, Fault(Reason.BAD_PATH_BETWEEN_NODES, False, because))


def _nothing_to_load(look: Look, job: Job, planned: Generation) -> Actions:
    """Its checkpoints are all damaged: that stays. Or this VM does not see them: another may."""
    if all(checkpoint.condemned for checkpoint in job.checkpoints):
        because = "No complete checkpoint is left to go on from."
        return close(look, job, JobState.FAILED, Reason.CHECKPOINT_DAMAGED, because)
    because = f"{planned.look_node} sees no complete checkpoint; is checkpoint.dir mounted there?"
    return end(look, job, Fault(Reason.CHECKPOINT_UNREACHABLE, False, because))


def _listing_fault(look: Look, planned: Generation, nodes: tuple[Node, ...]) -> Fault | None:
    """Why this number cannot be launched. ``nodes``: who could be asked instead."""
    looker = planned.look_node
    if (found := planned.found) is None:
        asked = (looker or "", planned.look_incarnation or "")
        if look.pool.find(*asked) is None or (nodes and not look.pool.answers(*asked)):
            because = f"{looker} went away while it listed the checkpoint folder"
            return Fault(Reason.NODE_LOST, False, because)
        bound = look.rules.look_deadline
        if look.now <= planned.created_at + bound:
            return None
        because = f"{looker} did not list the checkpoint folder within {seconds(bound)}"
        return Fault(Reason.CHECKPOINT_UNREACHABLE, False, because)
    if found.error is not None:
        because = f"{looker} cannot list the checkpoint folder: {found.error}"
        return Fault(Reason.CHECKPOINT_UNREACHABLE, False, because)
    if found.newest_marker >= planned.number:
        because = f"Generation {found.newest_marker} stands in the checkpoint folder already"
        return Fault(Reason.LAUNCHING, False, because)
    return None


def _has_settled(look: Look, job: Job, nodes: tuple[Node, ...]) -> bool:
    """No loss just now; and no join just now, where a start below the most nodes could use it."""
    if look.now < look.world.last_loss_at + look.rules.coalesce:
        return False
    is_full = job.spec.nodes.max is not None and len(nodes) >= job.spec.nodes.max
    if job.state is not JobState.STARTING or job.costs is None or is_full:
        return True
    settle = look.rules.settle
    joined = sorted(node.registered_at for node in nodes)
    enough_at = joined[job.spec.nodes.min - 1]
    return look.now >= min(joined[-1] + settle, enough_at + SETTLE_AT_MOST * settle)


def _launch(
    look: Look,
    job: Job,
    planned: Generation,
    nodes: tuple[Node, ...],
    choice: Choice,
    found: Checkpoint,
) -> Actions:
    slow = slow_among(nodes)
    aside = [node for node in nodes if look.pool.is_aside(node)]
    ordered = in_seating_order(job, turned(job.past, nodes), choice.shape.depth, slow, aside)
    seated = seats(job, ordered, choice.shape, slow)
    used = {(seat.node, seat.incarnation) for seat in seated}
    look.working |= used
    look.pool.take(job, (node for node in nodes if (node.name, node.incarnation) in used))
    because = launch_sentence(job, choice.shape, found, nodes, len(used), look.pool)
    because += last_resorts_of((n for n in nodes if (n.name, n.incarnation) in used), look.pool)
    because += spared(slow, seated, choice)
    every = period_of(job, look.now)
    launch = Launch(
        job=job.id,
        number=planned.number,
        kind="train",
        shape=choice.shape,
        cuts=choice.cuts,
        in_flight=choice.in_flight,
        seats=seated,
        resumed_from=ResumedFrom(step=found.step, generation=found.generation, folder=found.folder),
        because=because,
        plan_because=choice.because,
        save_every=every.seconds if every else None,
        save_because=every.because if every else "",
    )
    return launch, *say(job, job.state, job.reason, because)


def _launch_first_weights(
    look: Look, job: Job, planned: Generation, nodes: tuple[Node, ...]
) -> Actions:
    """One seat builds the real model from the seed, measures it, and writes step 0; the others help
    it measure links.
    """
    so_far = strain(job.past)
    first = (so_far.charged + so_far.unreachable) % len(nodes)  # is it the program, or a node?
    seated = probing_seats(job, (*nodes[first:], *nodes[:first]))
    shape = Shape(depth=1, replicas=len(seated), micro_batch=micro_batch_of(job))
    look.working |= {(seat.node, seat.incarnation) for seat in seated}
    because = f"Building and measuring the model on {seated[0].node}."
    because += last_resorts_of((n for n in nodes if n.name in {s.node for s in seated}), look.pool)
    launch = Launch(
        job=job.id,
        number=planned.number,
        kind="first_weights",
        shape=shape,
        cuts=(),
        seats=seated,
        resumed_from=None,
        because=because,
    )
    return launch, *say(job, job.state, job.reason, because)


# --- A launched generation: done, lost, at fault, or going on -----------------------------------


def _watch(look: Look, job: Job, generation: Generation) -> Actions | None:
    """Done? A node lost? A fault? A wish that it stops? Else it goes on."""
    if generation.kind == "first_weights":
        if job.costs is not None and resume.newest(job) is not None:
            return end(look, job, Fault(Reason.DONE, False, "The model is built and measured"))
    elif found := resume.final(job):
        return succeed(look, job, found)
    if generation.state is GenerationState.HALTED:
        return rescue(look, job, generation)
    dead, silent = look.missing(generation)
    if silent and not dead and not _goes_without(look, job, generation):
        return hold(look, job, silent)
    if dead or silent:
        marks = look.lose_missing(generation)
        because = loss_of(generation.nodes, look.pool)
        loss = Fault(Reason.NODE_LOST, False, because, spares_others=True)
        return *marks, *stop_by(look, job, loss)
    if spoilt := of_not_finite(generation.seats):
        return not_finite(look, job, spoilt)
    suspects = look.suspects(generation)
    if fault := fault_of(generation, job.spec.steps, suspects, look.now, look.rules):
        return stop_by(look, job, fault)
    if generation.state is GenerationState.DRAINING:
        return drained(look, job, generation)
    if not suspects and (hang := hang_of(look, job, generation)):
        return _about_hang(look, job, generation, hang)
    if wish := wish_of(look, job, generation):
        return drain(look, job, wish)
    if generation.kind == "first_weights":
        look.pool.take(job, (*look.seated(generation), *look.pool.offer(job)))
    return None


def _about_hang(look: Look, job: Job, generation: Generation, hang: Hang) -> Actions:
    """First all stacks are dumped; then it ends, or all are halted to see who does not."""
    if generation.dumped_at <= hang.since:
        because = f"{hang.because}; all ranks write their stacks into their logs."
        return (DumpStacks(job.id, generation.number, because),)
    if look.now < generation.dumped_at + look.rules.dump_seconds:
        return ()
    fault = Fault(Reason.HANG, False, hang.because, spares_others=True, blamed=hang.blamed)
    if hang.is_common and len(generation.seats) > 1:
        return find_who_hangs(look, job, fault)
    return end(look, job, fault)


def _goes_without(look: Look, job: Job, generation: Generation) -> bool:
    """Whether silent nodes may be given up: others can follow, or nothing is held yet."""
    launching = generation.state is GenerationState.LAUNCHING
    return launching or len(look.pool.offer(job)) >= job.spec.nodes.min


def _go_on(look: Look, job: Job) -> Actions:
    """Say that it runs, once it does, and tidy up behind it; or have it grow."""
    generation = job.current
    if generation is None or generation.committed == 0:
        return _on_setup(job, generation) if generation and job.spec.setup else ()
    if wish := room_to_grow(look, job, generation):
        return drain(look, job, wish)
    offered = {(node.name, node.incarnation) for node in look.pool.offer(job)}
    spare = len(offered.difference(generation.nodes))
    spares = f"; {count(spare, 'more VM')} ready, used at the next re-plan" if spare > 0 else ""
    message = f"Running {times(generation.shape)} on {count(len(generation.nodes), 'VM')}{spares}."
    said = say(job, JobState.RUNNING, None, message)
    moved: Actions = ()
    if generation.state is GenerationState.LAUNCHING:
        because = f"Step {generation.committed:,} is done on {times(generation.shape)}."
        moved = (MoveGeneration(job.id, generation.number, GenerationState.RUNNING, because),)
    more = (*_learn(look, job, generation), *_pace(look, job, generation))
    ready = to_prepare(look, job, generation)
    return *moved, *said, *more, *_tidy(look, job, generation), *ready


def _learn(look: Look, job: Job, generation: Generation) -> Actions:
    """Take what its steps really take into the costs."""
    if generation.state is not GenerationState.RUNNING:
        return ()
    slow = slow_among(look.seated(generation))
    if (costs := learned(job, generation, slow)) is None:
        return ()
    because = f"Steps up to {generation.committed:,} have moved the costs that plans are made by."
    return (LearnCosts(job.id, costs, because),)


def _pace(look: Look, job: Job, generation: Generation) -> Actions:
    """Tell how often to save, when that has moved; all the while the vote agrees on the step."""
    every = period_of(job, look.now)
    if every is None or job.save_cost is None or generation.state is not GenerationState.RUNNING:
        return ()
    if not has_moved(generation.save_every, every.seconds):
        return ()
    return (SaveEvery(job.id, generation.number, every.seconds, every.because),)


def _on_setup(job: Job, generation: Generation) -> Actions:
    """Say while machines of a launch are being set up that they are, and which."""
    nodes = dict.fromkeys(s.node for s in generation.seats if s.phase is Phase.SETUP)
    if not generation.is_launched:
        return ()
    if not nodes:
        return say(job, job.state, job.reason, generation.because)
    lines = count(len(job.spec.setup), "line")
    message = f"Running `setup` ({lines}) on {listed(list(nodes))}."
    return say(job, job.state, job.reason, message)


def _tidy(look: Look, job: Job, generation: Generation) -> Actions:
    """Order the deletion of what newer complete checkpoints have superseded."""
    folders = resume.superseded(job)
    answering = (n for n in look.seated(generation) if look.pool.answers(n.name, n.incarnation))
    node = next(answering, None)
    if not folders or node is None:
        return ()
    return (DeleteCheckpoints(job.id, generation.number, folders, node.name, node.incarnation),)
