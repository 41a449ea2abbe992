"""Why a launched generation cannot go on though no node is lost, and who pays for it. PURE.

    exit or Failed line   the program's fault (charged), the checkpoint's, or a link's
    halted too long       links broke and nobody is to blame: launched again

What hangs without a word is :mod:`controller.core.hangs`'s affair.
Facts of one accident arrive one by one, so what can be the shadow of a lost node (a signal, a
broken link) waits a moment for the node to be found out.
"""

from dataclasses import dataclass, replace

from controller.core.states import GenerationState, Reason
from controller.core.words import listed
from controller.core.world import Generation, Rules, Seat
from trainer.contract.progress import ExitCode, Phase


@dataclass(frozen=True)
class Fault:
    """Why the generation ends; ``damaged`` is the folder that is condemned with it."""

    reason: Reason
    charged: bool
    because: str
    damaged: str | None = None
    spares_others: bool = False
    """What the other ranks hold in memory is good."""
    blamed: str | None = None
    """The node that is at fault, if one alone is."""


def fault_of(
    generation: Generation, steps: int, suspects: frozenset[str], now: float, rules: Rules
) -> Fault | None:
    """The fault that stands; ranks' own failures before what they bring about. ``suspects``:
    seated nodes that do not answer; while there are any, what may be their doing is not judged.
    """
    return (
        _first_failure(generation, steps, suspects, now, rules)
        or _link_broke(generation, suspects, now, rules)
        or _ended_without_a_checkpoint(generation, now, rules)
    )


def _first_failure(
    generation: Generation, steps: int, suspects: frozenset[str], now: float, rules: Rules
) -> Fault | None:
    """Of what ranks failed by, the first in time: the others may only have followed from it."""
    failures = [(_failed_at(seat), seat.rank, seat) for seat in generation.seats]
    for at, _, seat in sorted((failure for failure in failures if failure[0]), key=_by_time):
        fault = _failure(generation, seat, steps)
        if fault is None:
            continue
        if seat.failed is None and seat.exit and seat.exit.signal is not None:
            if seat.node in suspects:
                continue
            if now < at + rules.coalesce:
                return None
        if now < at + _patience(generation, seat, fault, rules):
            return None
        return replace(fault, blamed=_alone(generation, seat, steps)) if fault.charged else fault
    return None


def _by_time(failure: tuple[float, int, Seat]) -> tuple[float, int]:
    return failure[:2]


def _failed_at(seat: Seat) -> float:
    """When it was first said that it failed or is gone; 0: it was not."""
    if seat.failed is not None and seat.failed_at:
        return seat.failed_at
    return seat.exit.at if seat.exit is not None else 0.0


def _failure(generation: Generation, seat: Seat, steps: int) -> Fault | None:
    """What it failed by, if by itself: a lost link is a consequence."""
    said = f"{_who(seat)}: {_last_words(seat)}"
    match _code(seat):
        case ExitCode.PROGRAM_ERROR | ExitCode.INTERNAL:
            return Fault(Reason.PROGRAM_ERROR, True, said)
        case ExitCode.SETUP_FAILED:
            return Fault(Reason.SETUP_FAILED, True, said)
        case ExitCode.CHECKPOINT_DAMAGED:
            link = generation.resumed_from
            return Fault(Reason.CHECKPOINT_DAMAGED, False, said, link.folder if link else None)
        case ExitCode.CHECKPOINT_UNREACHABLE:
            return Fault(Reason.CHECKPOINT_UNREACHABLE, False, said)
        case ExitCode.STALE:
            because = f"{_who(seat)} met a newer generation in the checkpoint folder"
            return Fault(Reason.LAUNCHING, False, because)
    if (end := seat.exit) is None:
        return None
    if end.signal is not None:
        because = f"{_who(seat)} was killed by signal {end.signal}"
        because += _out_of_memory(end.signal)
        return Fault(Reason.PROGRAM_ERROR, True, because, spares_others=True)
    early = generation.kind == "train" and seat.applied < steps
    if end.code not in set(ExitCode) or (end.code == ExitCode.DONE and early):
        because = f"{_who(seat)} exited with code {end.code}: {_last_words(seat)}"
        return Fault(Reason.PROGRAM_ERROR, True, because)
    return None


def _patience(generation: Generation, failed: Seat, fault: Fault, rules: Rules) -> float:
    """How long to wait for the others, if they may fail too: is it the program, or this node? Where
    no rank waits for another, until they are past there; else until they stand still, which they do
    as soon as they miss who failed.
    """
    others = [s for s in generation.seats if s.node != failed.node and not _failed_at(s)]
    awaited = [seat for seat in others if not seat.halted]
    early = (Phase.SETUP, Phase.BOOT, Phase.PROGRAM)
    if failed.phase in early:
        may_fail = any(seat.phase in (None, *early) for seat in awaited)
        return rules.verdict_patience if may_fail else 0.0
    return rules.coalesce if fault.charged and awaited else 0.0


def _alone(generation: Generation, failed: Seat, steps: int) -> str | None:
    """The node, if all that failed by themselves sit there and others do not."""
    own = {s.node for s in generation.seats if _failed_at(s) and _failure(generation, s, steps)}
    return failed.node if len(generation.nodes) > 1 and own == {failed.node} else None


def _link_broke(
    generation: Generation, suspects: frozenset[str], now: float, rules: Rules
) -> Fault | None:
    """Halted, left or cut off, and nobody is known to be the cause. A launch holds nothing, so it
    does not wait for a verdict on suspects.
    """
    left = (ExitCode.LEFT, ExitCode.PEER_LOST)
    for seat in generation.seats:
        if seat.exit is not None and seat.exit.code in left:
            since, what = seat.exit.at, "lost its link to a peer"
        elif seat.halted is not None:
            since, what = seat.halted_at, f"halted ({seat.halted.cause})"
        else:
            continue
        launching = generation.state is GenerationState.LAUNCHING
        patience = rules.coalesce if launching else rules.halt_patience
        if now < since + patience or (suspects and not launching):
            continue
        if suspects:
            because = f"{_who(seat)} {what} while {listed(sorted(suspects))} did not answer"
            return Fault(Reason.NODE_LOST, False, because, spares_others=True)
        because = f"{_who(seat)} {what}, though every VM answers"
        return Fault(Reason.BAD_PATH_BETWEEN_NODES, False, because, spares_others=True)
    return None


def _ended_without_a_checkpoint(generation: Generation, now: float, rules: Rules) -> Fault | None:
    """Every rank is done, and what they should have written is not known to be complete."""
    ends = [seat.exit for seat in generation.seats if seat.exit is not None]
    if len(ends) < len(generation.seats) or now < max(e.at for e in ends) + rules.look_deadline:
        return None
    if generation.kind == "first_weights":
        because = "The first weights ended without a complete checkpoint of step 0"
        return Fault(Reason.PROGRAM_ERROR, True, because)
    because = "Every rank ended, but the last checkpoint is not complete"
    return Fault(Reason.CHECKPOINT_UNREACHABLE, False, because)


def _code(seat: Seat) -> int | None:
    """Its exit code, as soon as it is known."""
    if seat.failed is not None:
        return seat.failed.code
    return seat.exit.code if seat.exit is not None else None


def _who(seat: Seat) -> str:
    return f"Rank {seat.rank} on {seat.node}"


def _last_words(seat: Seat) -> str:
    """What it said last: its own sentence, else the end of its log."""
    if seat.failed is not None:
        return seat.failed.message
    tail = seat.exit.log_tail if seat.exit else ""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _out_of_memory(signal: int) -> str:
    return " (out of memory?)" if signal == 9 else ""
