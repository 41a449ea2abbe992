"""How often a job may fail before it is given up, and how long it waits in between. PURE.

Only endings since the last progress count, and progress is a step further than any before. The
program's errors are charged against ``max_restarts``; losses of nodes never are, but a job that
kills its nodes must not loop for ever, so they have a bound of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.failing import is_of_one_node, same_in_a_row
from controller.core.states import Reason
from controller.core.words import count, ended, seconds
from controller.core.world import EndedGeneration, Job, Rules

PATIENT_LOSSES = 4
"""Losses in a row, each before a new step, that are answered without any delay."""
SAME_FAILURE = 3
"""The same failure at the same step so many times will not go away..."""
SAME_AT_START = 2
"""... nor will one before any step, which nothing but the program and its arguments leads to."""
FIRST_LISTINGS = 6
"""A checkpoint folder that was never reached is given up after so many tries..."""
REFUSED = ("Permission denied", "Read-only file system", "Not a directory", "not permitted")
"""... or, for a reason that time does not mend, after two."""


UNFORCED = (Reason.USER, Reason.EVICTION, Reason.SCALE_UP, Reason.STRAGGLER)
"""A wish that the generation stops: nothing has failed."""


_NOBODYS = (Reason.DONE, Reason.CHECKPOINT_DAMAGED, Reason.NON_FINITE_LOSS, *UNFORCED)


@dataclass(frozen=True)
class Strain:
    """Endings in a row without progress, by kind."""

    charged: int = 0
    """The program failed."""
    stuck: int = 0
    """A launch came to nothing, nobody's fault that we know of."""
    interrupted: int = 0
    """A node was lost before a new step."""
    unreachable: int = 0
    """The checkpoint folder could not be read or written."""
    unreachable_since: float = 0.0


def strain(past: Sequence[EndedGeneration]) -> Strain:
    """Count the endings since the last progress."""
    best, found = 0, Strain()
    for g in past:
        if g.committed > best or g.reason is Reason.DONE:
            best, found = max(best, g.committed), Strain()
        found = _counted(found, g)
    return found


def _counted(so_far: Strain, g: EndedGeneration) -> Strain:
    charged, stuck, interrupted = so_far.charged, so_far.stuck, so_far.interrupted
    unreachable, since = so_far.unreachable, so_far.unreachable_since
    if g.charged:
        charged += 1
    elif g.reason is Reason.CHECKPOINT_UNREACHABLE:
        unreachable, since = unreachable + 1, since if unreachable else g.ended_at
    elif g.launched and g.reason is Reason.NODE_LOST:
        interrupted += 1
    elif g.launched and g.reason not in _NOBODYS:
        stuck += 1
    return Strain(charged, stuck, interrupted, unreachable, since)


def not_before(past: Sequence[EndedGeneration], rules: Rules) -> float:
    """When the next generation may be planned: at once, or after a delay that doubles."""
    if not past:
        return 0.0
    last, found = past[-1], strain(past)
    if last.charged:
        failures = found.charged
    elif last.reason is Reason.CHECKPOINT_UNREACHABLE:
        failures = found.unreachable
    elif last.reason is Reason.NODE_LOST:
        failures = found.interrupted - PATIENT_LOSSES
    elif last.launched:
        failures = found.stuck - 1
    else:
        failures = 0
    return last.ended_at + delay(failures, rules)


def delay(failures: int, rules: Rules) -> float:
    """Seconds to wait after so many failures in a row."""
    if failures <= 0:
        return 0.0
    return float(min(rules.backoff_cap, rules.backoff * 2 ** min(failures - 1, 30)))


def given_up(job: Job, now: float, rules: Rules) -> tuple[Reason, str] | None:
    """Why the job is not tried again, or None."""
    if not job.past:
        return None
    found, last = strain(job.past), job.past[-1]
    because = ended(last.because)
    if same := _times_the_same(job.past):
        at = f"at step {last.reached + 1:,}" if last.reached else "before the first step"
        why = f"{because} The same {same} times {at}, so retrying will not help."
        return _reason(last), _ending_in(why, last)
    if found.charged > job.spec.recovery.max_restarts:
        attempts = count(found.charged, "attempt")
        why = f"{because} Given up after {attempts} without progress."
        return _reason(last), _ending_in(why, last)
    if found.stuck >= rules.max_launches_without_progress:
        launches = f"{found.stuck} launches in a row came to nothing"
        return Reason.RESTART_BUDGET, f"{because} Given up: {launches}."
    if found.interrupted >= rules.max_interrupted_launches:
        losses = f"{found.interrupted} launches in a row lost a VM before a new step"
        return Reason.RESTART_BUDGET, f"Given up: {losses}."
    if found.unreachable:
        tries = 2 if any(word in last.because for word in REFUSED) else FIRST_LISTINGS
        never_reached = not job.checkpoints and found.unreachable >= tries
        for_long = now - found.unreachable_since > job.spec.recovery.max_wait
        if never_reached or for_long:
            took = f"{found.unreachable} tries in {seconds(round(now - found.unreachable_since))}"
            return Reason.CHECKPOINT_UNREACHABLE, f"{because} Given up after {took}."
    return None


def _times_the_same(past: Sequence[EndedGeneration]) -> int:
    """How often it failed in the same way, when that is once too often; else 0."""
    same = same_in_a_row(past)
    if not same:
        return 0
    if same[-1].reached:
        return len(same) if len(same) >= SAME_FAILURE else 0
    told = bool(same[-1].error) and not is_of_one_node(same)
    return len(same) if told and len(same) >= SAME_AT_START else 0


def _reason(last: EndedGeneration) -> Reason:
    """Why a job fails whose program did not get on."""
    own = (Reason.NON_FINITE_LOSS, Reason.SETUP_FAILED)
    return last.reason if last.reason in own else Reason.PROGRAM_ERROR


def _ending_in(why: str, last: EndedGeneration) -> str:
    """... with the last lines of the log."""
    return f"{why} Its last lines: {last.tail}" if last.tail else why
