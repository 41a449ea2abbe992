"""While a generation stands still: who is waited for, who applies, who saves, when it ends. PURE.

    a wish --> draining: all stop after the same step, each saves its share --> ended
    a loss --> halted: survivors report, who is behind applies the vote, each saves --> ended

Decided afresh at every look from what was reported and ordered, so a further loss needs no case of
its own: what is written counts, what the lost were to write goes to others, and when a layer has
no holder left the job goes on from the newest complete checkpoint.
"""

from dataclasses import replace

from controller.core import salvage
from controller.core.actions import MoveGeneration, RollForward, Salvage, StandStill, Survivor
from controller.core.ending import Actions, end, hold, say
from controller.core.faults import Fault
from controller.core.hangs import hung
from controller.core.look import Look
from controller.core.states import GenerationState, JobState, Reason
from controller.core.story import loss_of
from controller.core.wishes import Wish, drain_bound, time_left
from controller.core.words import capitalised, count, listed, seconds
from controller.core.world import Ending, Generation, Job, Node, Seat
from trainer.contract.progress import NonFinite

# --- A loss or a fault ---------------------------------------------------------------------------


def stop_by(look: Look, job: Job, fault: Fault) -> Actions:
    """End by ``fault``; where survivors hold what is worth saving, have them stand still first."""
    generation = job.current
    assert generation is not None
    left = [seat.rank for seat in _alive(look, generation)]
    if fault.spares_others and salvage.is_worth_it(job, generation, left, look.rules):
        return _halt(look, job, generation, fault)
    return end(look, job, fault)


def find_who_hangs(look: Look, job: Job, fault: Fault) -> Actions:
    """Halt all: those that wait for others stand still, and the one that they wait for does not."""
    assert job.current is not None
    return _halt(look, job, job.current, fault)


def _halt(look: Look, job: Job, generation: Generation, fault: Fault) -> Actions:
    hangs = fault.reason is Reason.HANG
    kept = f"the others keep step {generation.committed:,}"
    what = "all are halted to see who hangs" if hangs else kept
    message = f"{fault.because}; {what}."
    state = JobState.RECOVERING if job.state is JobState.RUNNING else job.state
    said = say(job, state, fault.reason, message)
    halted = replace(
        generation,
        state=GenerationState.HALTED,
        ending=Ending(fault.reason, fault.charged, fault.because, look.now, fault.blamed),
    )
    job = replace(job, state=state, reason=fault.reason, message=message, current=halted)
    still = _still(job, generation, GenerationState.HALTED, fault)
    return still, *said, *rescue(look, job, halted)


def _still(job: Job, generation: Generation, state: GenerationState, fault: Fault) -> StandStill:
    return StandStill(
        job=job.id,
        number=generation.number,
        state=state,
        reason=fault.reason,
        charged=fault.charged,
        because=fault.because,
        blamed=fault.blamed,
    )


def rescue(look: Look, job: Job, generation: Generation) -> Actions:
    """The next thing to do about a halted generation; nothing: wait."""
    assert generation.ending is not None
    _, silent = look.missing(generation)
    if silent and len(look.pool.offer(job)) == 0:  # that may be our own network
        return hold(look, job, silent)
    marks = look.lose_missing(generation)
    alive = _alive(look, generation)
    answering = [s for s in alive if look.pool.answers(s.node, s.incarnation)]
    hangs = generation.ending.reason is Reason.HANG
    patience = look.rules.hang_patience if hangs else look.rules.halt_bound
    in_time = look.now < generation.ending.at + patience
    if in_time and any(seat.halted is None for seat in answering):
        return tuple(marks)
    survivors = salvage.standing_still(answering)
    best = salvage.best_step(survivors)
    late, ballot = salvage.behind(survivors, best)
    if told := [seat for seat in late if not seat.forwarded_at]:
        because = f"{_ranks(told)} missed the vote of step {best:,} and apply it now."
        roll = RollForward(
            job.id, generation.number, best, ballot, tuple(map(_survivor, told)), because
        )
        return *marks, roll
    if any(look.now < seat.forwarded_at + look.rules.halt_bound for seat in late):
        return tuple(marks)
    holders = [s for s in survivors if s.halted.applied == best and not _is_overdue(look, job, s)]
    suspects = [seat for seat in alive if seat not in answering]
    just_now = look.now < generation.ending.at + look.rules.coalesce
    may_come = in_time and any(seat.halted or just_now for seat in suspects)
    return *marks, *_save(look, job, generation, best, holders, may_come)


def _save(
    look: Look,
    job: Job,
    generation: Generation,
    best: int,
    holders: list[salvage.Standing],
    may_come: bool,
) -> Actions:
    """Have ``holders`` write what is missing of step ``best``; end when all is written, or cannot
    be. ``may_come``: suspects may be holders yet.
    """
    written = salvage.written(job, generation, best)
    layers = range(len(job.costs.layers)) if job.costs else ()
    if layers and written.issuperset(layers):
        saved = f"survivors saved step {best:,}"
        return end(look, job, _fault(look, generation, saved))
    refused = any(seat.refused for seat in generation.seats)
    unwritten = "survivors could not write what they hold" if refused else ""
    if salvage.steps_at_risk(job, best) <= 0:  # or nobody is left who could write
        return end(look, job, _fault(look, generation, unwritten))
    writing = {layer for s in holders for layer in s.seat.saving}
    missing = set(layers) - written - writing
    if not missing:
        return ()
    dealt = salvage.shares(job, holders, missing)
    if dealt is None:
        lost = unwritten or "no survivor holds every layer any more"
        return () if may_come else end(look, job, _fault(look, generation, lost))
    seats = {s.seat.rank: s.seat for s in holders}
    because = f"{count(len(dealt), 'survivor')} {'saves' if len(dealt) == 1 else 'save'}"
    order = Salvage(
        job=job.id,
        number=generation.number,
        step=best,
        survivors=tuple(_survivor(seats[rank]) for rank in dealt),
        layers=tuple(dealt.values()),
        because=f"{because} {count(len(missing), 'layer')} of step {best:,} from memory.",
    )
    return (order,)


# --- A wish ------------------------------------------------------------------------------------


def drain(look: Look, job: Job, wish: Wish) -> Actions:
    """Have all ranks stop after the same step and save it; when a node is taken before that could
    be done, halt now. What is launching holds nothing and ends.
    """
    generation = job.current
    assert generation is not None
    fault = Fault(wish.reason, False, wish.because, spares_others=True)
    if generation.state is GenerationState.LAUNCHING:
        return end(look, job, fault)
    if time_left(look, job, generation) < generation.step_seconds:
        aborted = "too soon for another step: the one under way is aborted"
        return stop_by(look, job, replace(fault, because=f"{wish.because}, {aborted}"))
    still = _still(job, generation, GenerationState.DRAINING, fault)
    message = f"{wish.because}; all stop after the same step and save it."
    return still, *say(job, job.state, wish.reason, message)


def not_finite(look: Look, job: Job, found: NonFinite) -> Actions:
    """A step would spoil the weights: all ranks stop by themselves after the one before, and save
    it. That is a drain that nobody has to ask for.
    """
    generation = job.current
    assert generation is not None
    if generation.state is GenerationState.DRAINING:
        return drained(look, job, generation)
    what, where = capitalised(found.what), f"step {found.step:,} on replica {found.replica}"
    because = f"{what} is not finite at {where}"
    if generation.state is GenerationState.LAUNCHING and generation.committed:
        done = f"Step {generation.committed:,} is done."
        return (MoveGeneration(job.id, generation.number, GenerationState.RUNNING, done),)
    if generation.state is GenerationState.LAUNCHING:  # what it resumed from is saved
        return end(look, job, Fault(Reason.NON_FINITE_LOSS, False, because))
    return drain(look, job, Wish(Reason.NON_FINITE_LOSS, because))


def drained(look: Look, job: Job, generation: Generation) -> Actions:
    """End when the step that all stopped after is saved; halt when that takes too long."""
    ending = generation.ending
    assert ending is not None
    stopped = max(seat.stopped for seat in generation.seats)
    fault = Fault(ending.reason, ending.charged, ending.because, None, True, ending.blamed)
    if stopped and salvage.steps_at_risk(job, stopped) <= 0:
        outcome = f"drained at step {stopped:,}"
        if ending.reason is Reason.NON_FINITE_LOSS:  # the sentence says where it goes on
            outcome = ""
        return end(look, job, _fault(look, generation, outcome))
    if mute := _only_mute_are_awaited(look, generation):
        silence = seconds(look.rules.mute_after)
        marks = [look.lose(n, f"{n.name} has not answered for {silence}") for n in mute]
        return *marks, *stop_by(look, job, fault)
    have_failed = all(seat.stopped or seat.exit for seat in generation.seats)
    is_late = look.now > ending.at + drain_bound(job, generation, look.rules)
    if have_failed or is_late or time_left(look, job, generation) < 0:
        return stop_by(look, job, fault)
    return ()


def _only_mute_are_awaited(look: Look, generation: Generation) -> list[Node]:
    """The nodes whose agents say nothing any more, once all others' ranks have stopped."""
    mute = look.mute(generation)
    names = {node.name for node in mute}
    others = [seat for seat in generation.seats if seat.node not in names]
    return mute if others and all(seat.stopped or seat.exit for seat in others) else []


# --- Small -------------------------------------------------------------------------------------


def _fault(look: Look, generation: Generation, outcome: str) -> Fault:
    """What it ends by, with what came of standing still."""
    ending = generation.ending
    assert isinstance(ending, Ending)
    lost = ending.reason is Reason.NODE_LOST
    because = loss_of(generation.nodes, look.pool) if lost else ending.because.rstrip(".")
    blamed = ending.blamed
    if ending.reason is Reason.HANG:
        who, blamed = _who_hangs(look, generation)
        because = f"{because}; {who}"
    said = f"{because}; {outcome}" if outcome else because
    return Fault(ending.reason, ending.charged, said, blamed=blamed)


def _who_hangs(look: Look, generation: Generation) -> tuple[str, str | None]:
    """The sentence's part, and the node if it is one alone."""
    here = [s for s in generation.seats if look.pool.find(s.node, s.incarnation)]
    found = hung(here)
    if not found:
        return "all ranks answered, so a path between two VMs may be cut", None
    names = listed([f"rank {seat.rank} on {seat.node}" for seat in found])
    verb, its = (
        ("hangs", "its stacks are in its log")
        if len(found) == 1
        else ("hang", "their stacks are in their logs")
    )
    nodes = {seat.node for seat in found}
    return f"{names} {verb} ({its})", nodes.pop() if len(nodes) == 1 else None


def _alive(look: Look, generation: Generation) -> list[Seat]:
    """Whose process and node are not known to be gone."""
    return [
        seat
        for seat in generation.seats
        if seat.exit is None and look.pool.find(seat.node, seat.incarnation)
    ]


def _is_overdue(look: Look, job: Job, survivor: salvage.Standing) -> bool:
    """Whether it should have written its share by now."""
    seat, rules = survivor.seat, look.rules
    if not seat.saving or job.current is None:
        return False
    written = salvage.written(job, job.current, survivor.halted.applied)
    bound = max(rules.save_deadline, 3 * salvage.predicted_seconds(job, 1))
    return not written.issuperset(seat.saving) and look.now > seat.saving_at + bound


def _survivor(seat: Seat) -> Survivor:
    return Survivor(seat.rank, seat.node, seat.incarnation)


def _ranks(seats: list[Seat]) -> str:
    numbers = listed([str(seat.rank) for seat in seats])
    return f"Rank{'s' if len(seats) > 1 else ''} {numbers}"
