"""How a generation ends, and what follows in the same breath. PURE.

An end and its successor are one decision: it is said why, and the job gives up, waits, pauses
between two tries, or takes the next number at once. So nothing is ever left hanging between two
looks, and evictions, errors and outages all come through this one door.
"""

from dataclasses import replace
from itertools import takewhile

from controller.core import resume
from controller.core.actions import (
    Action,
    Condemn,
    EndGeneration,
    MarkDone,
    MoveJob,
    PlanGeneration,
)
from controller.core.assign import choice_for
from controller.core.budget import UNFORCED, given_up, not_before, strain
from controller.core.failing import words_of
from controller.core.faults import Fault
from controller.core.liveness import is_silent
from controller.core.look import Look
from controller.core.paths import are_doubtful
from controller.core.quarantine import fails_on
from controller.core.states import JobState, Reason
from controller.core.story import last_resorts_of, loss
from controller.core.words import count, ended, listed, seconds
from controller.core.world import Checkpoint, EndedGeneration, Generation, Job, Node
from controller.planner.choose import NoPlan

Actions = tuple[Action, ...]


def end(look: Look, job: Job, fault: Fault, above: int = 0) -> Actions:
    """End ``job``'s current generation by ``fault``, and go on; see :func:`follow`."""
    assert job.current is not None
    because = ended(fault.because)
    actions = _stop(look, job, replace(fault, because=because))
    if any(c.folder == fault.damaged and not c.condemned for c in job.checkpoints):
        actions += (Condemn(job.id, fault.damaged or "", because),)
    past = (*job.past, _over(job.current, fault, look.now))
    job = replace(job, current=None, past=past)
    if fault.reason is Reason.NON_FINITE_LOSS:
        return actions + _pause_at_fault(look, job, because)
    return actions + follow(look, job, above)


def follow(look: Look, job: Job, above: int = 0) -> Actions:
    """``job`` has no generation: give up, wait, or plan one (with a number above ``above``)."""
    if found := resume.final(job):
        return succeed(look, job, found)
    if job.pause_wanted:
        return _pause(look, job)
    if verdict := given_up(job, look.now, look.rules):
        return close(look, job, JobState.FAILED, *verdict)
    nodes = look.pool.offer(job)
    if look.is_gathering(job):
        look.pool.take(job, nodes)
        message = "The controller was started anew and waits for the agents to say what runs."
        return say(job, job.state, job.reason, message)
    if len(nodes) < job.spec.nodes.min:
        return _with_too_few(look, job, nodes)
    choice = choice_for(job, nodes)
    if isinstance(choice, NoPlan):
        if choice.hopeless:
            return close(look, job, JobState.FAILED, Reason.NO_PLAN_FITS, choice.because)
        return _wait(look, job, Reason.NO_PLAN_FITS, choice.because)
    look.pool.take(job, nodes)
    state, reason, message = _coming(look, job, nodes)
    message += last_resorts_of(nodes, look.pool)
    if look.now < not_before(job.past, look.rules):
        return say(job, state, reason, message)
    # Another node is asked each time in a row that the folder could not be listed.
    node = nodes[strain(job.past).unreachable % len(nodes)]
    number = max(job.last_number, above) + 1
    asked = nodes if len(nodes) > 1 and are_doubtful(job.past) else ()
    connect = tuple((node.name, node.incarnation) for node in asked)
    plan = PlanGeneration(job.id, number, node.name, node.incarnation, message, connect)
    return plan, *say(job, state, reason, message)


def take_up(look: Look, job: Job) -> Actions:
    """A paused job is to go on."""
    message = "Resumed by the user."
    waiting = replace(
        job, state=JobState.WAITING, reason=None, message=message, waiting_since=look.now
    )
    return MoveJob(job.id, JobState.WAITING, None, message), *follow(look, waiting)


def _pause(look: Look, job: Job) -> Actions:
    """Nothing of it runs any more."""
    look.pool.release(job)
    found = resume.newest(job)
    at = f" at step {found.step:,}" if found else ""
    return say(job, JobState.PAUSED, Reason.USER, f"Paused by the user{at}.")


def _pause_at_fault(look: Look, job: Job, because: str) -> Actions:
    """What it computes is not finite: a person must look. Again and again: it is given up."""
    if verdict := given_up(job, look.now, look.rules):
        return close(look, job, JobState.FAILED, *verdict)
    look.pool.release(job)
    found = resume.newest(job)
    go_on = f"Resume from step {found.step:,}, or see the log." if found else "See the log."
    return say(job, JobState.PAUSED, Reason.NON_FINITE_LOSS, f"{because} Paused. {go_on}")


def hold(look: Look, job: Job, silent: tuple[Node, ...]) -> Actions:
    """Silence alone ends a generation only when a successor can follow: nodes that come back
    healthy (our own network failed, say) are taken back with their running generation.
    """
    assert job.current is not None
    said = f"{_who_has(silent)} not answered for {seconds(look.rules.lost_after)}"
    theirs = len(silent) < len(job.current.nodes)  # all at once may be our own network
    if (theirs and job.spec.recovery.below_min == "fail") or _has_waited_too_long(look, job):
        because = f"{said}, and too few VMs are left."
        return close(look, job, JobState.FAILED, Reason.TOO_FEW_NODES, because)
    ready = _ready(look, job)
    return say(job, JobState.WAITING, Reason.TOO_FEW_NODES, f"{said}; waiting for VMs: {ready}.")


def succeed(look: Look, job: Job, found: Checkpoint) -> Actions:
    """``found`` is the complete final checkpoint: the job is over."""
    nodes = (*(look.seated(job.current) if job.current else ()), *look.pool.offer(job))
    writer = next((n for n in nodes if look.pool.answers(n.name, n.incarnation)), None)
    because = f"Done: {count(job.spec.steps, 'step')}."
    actions = close(look, job, JobState.SUCCEEDED, Reason.DONE, because)
    if writer is None:
        return actions
    done = MarkDone(
        job=job.id,
        generation=job.last_number,
        step=found.step,
        folder=found.folder,
        node=writer.name,
        incarnation=writer.incarnation,
    )
    return (*actions, done)


def close(look: Look, job: Job, state: JobState, reason: Reason, because: str) -> Actions:
    """The job is over; its nodes are free."""
    actions = _stop(look, job, Fault(reason, False, because))
    look.pool.release(job)
    return (*actions, MoveJob(job.id, state, reason, because))


def say(job: Job, state: JobState, reason: Reason | None, message: str) -> tuple[MoveJob, ...]:
    """The move to ``state`` with this message; nothing when the job says so already."""
    if (job.state, job.reason, job.message) == (state, reason, message):
        return ()
    return (MoveJob(job.id, state, reason, message),)


def _stop(look: Look, job: Job, fault: Fault) -> Actions:
    """End the current generation, if there is one; silent members are lost with it."""
    if (generation := job.current) is None:
        return ()
    marks: list[Action] = []
    for node in look.seated(generation):
        look.working.discard((node.name, node.incarnation))
        if is_silent(node, None, look.world, look.now, look.rules):
            marks.append(look.lose(node, look.silence_of(node)))
    over = EndGeneration(
        job.id, generation.number, fault.reason, fault.charged, fault.because, fault.blamed
    )
    return *marks, over


def _over(generation: Generation, fault: Fault, now: float) -> EndedGeneration:
    error, tail = words_of(generation.seats)
    return EndedGeneration(
        number=generation.number,
        kind=generation.kind,
        resumed_from=generation.resumed_from,
        committed=generation.committed,
        charged=fault.charged,
        ended_at=now,
        launched=bool(generation.seats),
        reason=fault.reason,
        because=ended(fault.because),
        shape=generation.shape,
        nodes=generation.nodes,
        blamed=fault.blamed,
        error=error,
        tail=tail,
    )


def _coming(look: Look, job: Job, nodes: tuple[Node, ...]) -> tuple[JobState, Reason, str]:
    """State, reason and sentence of a job that is about to be planned, again or first."""
    is_new = job.state in (JobState.WAITING, JobState.STARTING)
    state = JobState.STARTING if is_new else JobState.RECOVERING
    on = count(len(nodes), "VM")
    last = job.past[-1] if job.past else None
    if last is None or last.reason in (None, Reason.DONE):
        return state, Reason.LAUNCHING, f"Planning on {on}."
    pause = not_before(job.past, look.rules) - last.ended_at
    after = f" in {seconds(pause)}" if pause > 0 else ""
    if last.reason is Reason.NODE_LOST:
        return state, Reason.NODE_LOST, f"{loss(job, look.pool)}; re-planning on {on}{after}."
    if last.reason in UNFORCED:
        return state, last.reason, f"{last.because.rstrip('.')}; re-planning on {on}{after}."
    again = "Launching again"
    if last.charged:
        attempt = strain(job.past).charged + 1
        again = f"Attempt {attempt} of {job.spec.recovery.max_restarts + 1} follows"
    return state, last.reason or Reason.LAUNCHING, f"{ended(last.because)} {again}{after}."


def _with_too_few(look: Look, job: Job, nodes: tuple[Node, ...]) -> Actions:
    """Fewer nodes answer than the job needs: wait for the verdict on suspects, or for VMs."""
    last = job.past[-1] if job.past else None
    if job.state is not JobState.WAITING and look.pool.could_answer(job) >= job.spec.nodes.min:
        return say(job, *_coming(look, job, nodes))
    ready = f"for VMs: {_ready(look, job)}."
    because = f"Waiting {ready}"
    if last and (last.reason is Reason.NODE_LOST or _fell_short(last)):
        cause = last.because.rstrip(".") if _fell_short(last) else loss(job, look.pool)
        because = f"{cause}; waiting {ready}"
        if job.spec.recovery.below_min == "fail":
            return close(look, job, JobState.FAILED, Reason.TOO_FEW_NODES, because)
    return _wait(look, job, Reason.TOO_FEW_NODES, because)


def _wait(look: Look, job: Job, reason: Reason, because: str) -> Actions:
    look.pool.release(job)
    if _has_waited_too_long(look, job):
        because = f"{because} Given up after {seconds(job.spec.recovery.max_wait)}."
        return close(look, job, JobState.FAILED, reason, because)
    return say(job, JobState.WAITING, reason, because)


def _has_waited_too_long(look: Look, job: Job) -> bool:
    """Attempts that fell short of a launch in between interrupt no wait."""
    attempts = takewhile(_fell_short, reversed(job.past))
    since = min([job.waiting_since, *(g.ended_at for g in attempts)])
    return job.state is JobState.WAITING and look.now - since > job.spec.recovery.max_wait


def _fell_short(g: EndedGeneration) -> bool:
    """Whether it was not launched, since too few of its nodes reach each other."""
    return g.reason is Reason.BAD_PATH_BETWEEN_NODES and not g.launched


def _ready(look: Look, job: Job) -> str:
    aside = look.pool.aside(job)
    apart = f", {len(aside)} set aside" if aside else ""
    if useless := [node.name for node in aside if fails_on(job, node)]:
        apart += f" ({job.name} failed on {listed(useless)} alone)"
    return f"{len(look.pool.offer(job))} of at least {job.spec.nodes.min} ready{apart}"


def _who_has(nodes: tuple[Node, ...]) -> str:
    """``vm-1 has``, ``vm-1 and vm-2 have``."""
    return f"{listed([node.name for node in nodes])} {'has' if len(nodes) == 1 else 'have'}"
