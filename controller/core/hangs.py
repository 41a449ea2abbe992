"""Whether a launch or a run hangs though every VM answers: each phase has its bound. PURE.

    phase                        who is late                           since
    setup boot program load save each by itself                        it entered the phase
    rendezvous first_step step   nobody alone: ranks wait for each     the last of them entered it,
      evaluation                 other                                 or a step was committed

Only those that are furthest behind are judged: the others may be waiting for them. A hang is first
dumped (all stacks go into the logs), then ended; where nobody alone is late all are halted, and who
does not stand still is the one (:mod:`controller.core.standstill`).

A hang is found within its bound and the silences: time in which one of the VMs was not heard for so
long that it might have been lost does not count, whoever was away, it or we, and nothing is judged
until it has had a moment to tell what it did meanwhile. Shorter gaps between its beats are nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.core import salvage
from controller.core.look import Look
from controller.core.states import GenerationState
from controller.core.words import listed, seconds
from controller.core.world import Generation, Job, Rules, Seat
from trainer.contract.progress import Phase

FIRST_WEIGHTS_PATIENCE = 5
"""Building and measuring the whole model once may take so many times as long as importing it."""
TELLING_SECONDS = 1.0
"""Who was away tries again at least once a second."""
TIMES_THE_USUAL = 10
"""A step, or a save, may take so many times what they took lately."""
_ON_THE_WAY = (
    Phase.SETUP,
    Phase.BOOT,
    Phase.PROGRAM,
    Phase.RENDEZVOUS,
    Phase.LOAD,
    Phase.FIRST_STEP,
    Phase.STEP,
    Phase.EVALUATION,
    Phase.SAVE,
    Phase.DONE,
)
_TOGETHER = (Phase.RENDEZVOUS, Phase.FIRST_STEP, Phase.STEP, Phase.EVALUATION, Phase.DONE)
_STEPPING = (Phase.FIRST_STEP, Phase.STEP, Phase.EVALUATION)


@dataclass(frozen=True)
class Hang:
    """A phase has taken longer than it may."""

    phase: Phase
    since: float
    bound: float
    late: tuple[Seat, ...]
    """Who it may be."""

    @property
    def is_common(self) -> bool:
        """Ranks wait for each other: who it is shows when all are halted."""
        return self.phase in _STEPPING

    @property
    def blamed(self) -> str | None:
        """The node, when all that are late are by themselves and sit there."""
        nodes = {seat.node for seat in self.late}
        return None if self.phase in _TOGETHER or len(nodes) > 1 else nodes.pop()

    @property
    def because(self) -> str:
        """The cause, a sentence's first half."""
        bound = seconds(round(self.bound))
        if self.phase in (Phase.STEP, Phase.EVALUATION):
            return f"No step for {bound} though every VM answers"
        if self.phase in _TOGETHER:
            return f"No rank got past {_named(self.phase)} in {bound} though every VM answers"
        ranks = listed([f"rank {seat.rank} on {seat.node}" for seat in self.late])
        return f"{ranks[:1].upper()}{ranks[1:]} did not get past {_named(self.phase)} in {bound}"


def hang_of(look: Look, job: Job, generation: Generation) -> Hang | None:
    """What hangs, if anything. Before we were started we may have missed what was to be heard."""
    world, now, rules = look.world, look.now, look.rules
    gaps = [gap for node in look.seated(generation) for gap in node.silences]
    away = [(begin, end) for begin, end in gaps if end - begin > rules.lost_after]
    heard_at = max((end for _, end in away), default=0.0)
    if now <= max(world.grace_until, heard_at + TELLING_SECONDS):
        return None
    if generation.state not in (GenerationState.LAUNCHING, GenerationState.RUNNING):
        return None
    seats = [seat for seat in generation.seats if seat.exit is None]
    if not seats or any(seat.halted or seat.failed or seat.stopped for seat in generation.seats):
        return None
    phase = min((_phase(seat) for seat in seats), key=_ON_THE_WAY.index)
    behind = [seat for seat in seats if _phase(seat) is phase]
    bound = bound_of(phase, job, generation, rules)
    floor = max(generation.launched_at, world.started_at)
    if phase in _TOGETHER:
        since = max(floor, generation.committed_at, *(seat.phase_at for seat in seats))
        late = tuple(behind) if _seconds_heard(since, now, away) > bound else ()
    else:
        since_each = {s.rank: max(floor, s.phase_at) for s in behind}
        late = tuple(s for s in behind if _seconds_heard(since_each[s.rank], now, away) > bound)
        since = max((since_each[s.rank] for s in late), default=floor)
    return Hang(phase, since, bound, late) if late else None


def bound_of(phase: Phase, job: Job, generation: Generation, rules: Rules) -> float:
    """Seconds that ``phase`` may take."""
    bounds = rules.bounds
    whole_state = salvage.predicted_seconds(job, 1)
    match phase:
        case Phase.SETUP:  # the agent sees to the bound, and says so
            return job.spec.setup_timeout + bounds.boot
        case Phase.BOOT:
            return max(bounds.boot, TIMES_THE_USUAL * whole_state)
        case Phase.PROGRAM if generation.kind == "first_weights":
            return FIRST_WEIGHTS_PATIENCE * bounds.program
        case Phase.PROGRAM:
            return bounds.program
        case Phase.RENDEZVOUS:
            return bounds.rendezvous
        case Phase.LOAD:
            return max(bounds.load, TIMES_THE_USUAL * whole_state)
        case Phase.FIRST_STEP:
            return bounds.first_step
        case Phase.EVALUATION:
            return bounds.evaluation
        case Phase.SAVE | Phase.DONE:
            return max(bounds.save, TIMES_THE_USUAL * whole_state)
        case _:
            return max(bounds.step, TIMES_THE_USUAL * generation.step_seconds)


def hung(seats: Sequence[Seat]) -> list[Seat]:
    """Of ranks that were ordered to stand still and had the time: who does not. One whose control
    thread is silent is stopped; one that is torn did not come back from what it computes.
    """
    return [seat for seat in seats if seat.halted is None or seat.halted.torn]


def _seconds_heard(since: float, now: float, away: Sequence[tuple[float, float]]) -> float:
    """From ``since`` until ``now``, but for the times of ``away``."""
    heard, at = 0.0, since
    for begin, end in sorted(away):
        heard += max(0.0, begin - at)
        at = max(at, end)
    return heard + now - at


def _phase(seat: Seat) -> Phase:
    return seat.phase if seat.phase and seat.phase in _ON_THE_WAY else Phase.BOOT


def _named(phase: Phase) -> str:
    return phase.value.replace("_", " ")
