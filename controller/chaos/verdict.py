"""Whether the promises held, from what was seen. PURE.

Each invariant is a function of what was seen and gives one line of the report. What could not be
looked at does not hold: a checker that saw nothing has proved nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from controller.core.words import count

TOLERANCE = 1e-5
"""Relative, of a loss against its replay."""
MORPH_STEPS = 20
"""How many steps after each morph are replayed, where so many were committed."""


@dataclass(frozen=True)
class Invariant:
    """One promise: whether it held, and what was seen, in half a sentence."""

    name: str
    holds: bool
    said: str


@dataclass(frozen=True)
class Seen:
    """The job at one moment, as the controller said it."""

    at: float
    generation: int
    """The newest number."""
    step: int
    saved: int
    """The step of the newest complete checkpoint that counts."""


@dataclass(frozen=True)
class Launch:
    """One generation that was launched: where it went on, and the losses of its steps by step."""

    generation: int
    resumed_from: int
    losses: Mapping[int, float | None]
    micro_batch: int = 1


@dataclass(frozen=True)
class Replay:
    """The same steps again, undisturbed, from the checkpoint that a generation went on from."""

    generation: int
    losses: Mapping[int, float | None]
    problem: str = ""
    """Why there are none."""


def each_sample_once(steps: int, gap: str | None) -> Invariant:
    """``gap``: what the ledger says is wrong; None: nothing."""
    if gap is None and steps == 0:
        gap = "no step was committed"
    return Invariant("each sample once", gap is None, gap or f"in {steps:,} steps")


def steps_monotone(seen: Sequence[Seen], launches: Sequence[Launch]) -> Invariant:
    """The committed step goes back only when a new generation goes on from before it, once for
    each, and not to before where that one goes on; numbers of generations only grow.
    """
    wrong = "" if seen else "nobody looked"
    # The last generation that is known to have begun to commit: it explains no step back.
    settled = min((launch.generation for launch in launches), default=0)
    for before, after in pairwise(seen):
        if after.generation < before.generation:
            wrong = f"generation {after.generation} came after {before.generation}"
        settled = max(settled, _first_to_commit(before.step, launches))
        if after.step < before.step:
            causes = [
                launch.generation
                for launch in launches
                if settled < launch.generation <= after.generation
                and launch.resumed_from <= after.step
            ]
            settled = min(causes, default=settled)
            if not causes:
                wrong = f"step {before.step} fell to {after.step} at {after.at:.1f} s"
    return Invariant("committed steps monotone", not wrong, wrong or f"{len(seen):,} looks")


def _first_to_commit(step: int, launches: Sequence[Launch]) -> int:
    return min((launch.generation for launch in launches if step in launch.losses), default=0)


def nothing_saved_is_lost(
    seen: Sequence[Seen], launches: Sequence[Launch], condemned: int
) -> Invariant:
    """A generation goes on from the newest complete checkpoint that was known before it, or from a
    newer one; a condemned one is an excuse.
    """
    wrong = []
    for launch in launches:
        saved = max((s.saved for s in seen if s.generation < launch.generation), default=0)
        if launch.resumed_from < saved:
            wrong.append(
                f"generation {launch.generation} went back to step {launch.resumed_from}, "
                f"though step {saved} was saved"
            )
    held = len(wrong) <= condemned
    return Invariant(
        "nothing saved is lost", held, "; ".join(wrong) or count(len(launches), "generation")
    )


def one_writer(complaints: Sequence[str], looks: int) -> Invariant:
    """``complaints``: what was seen of files that changed and of trainers that should be gone."""
    held = not complaints and looks > 0
    said = complaints[0] if complaints else f"{looks:,} looks"
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return Invariant("one writer of a folder", held, said + more)


def replays_equal(launches: Sequence[Launch], replays: Sequence[Replay]) -> Invariant:
    """Each generation that committed steps, against its replay."""
    name = f"{MORPH_STEPS} steps after each morph equal their replay"
    replayed = {replay.generation: replay for replay in replays}
    worst, compared, wrong = 0.0, 0, []
    trained = that_trained(launches)
    for launch in trained:
        replay = replayed.get(launch.generation, Replay(launch.generation, {}, "was not replayed"))
        if replay.problem:
            wrong.append(f"generation {launch.generation} {replay.problem}")
            continue
        steps = to_replay(launch)
        if missing := [step for step in steps if step not in replay.losses]:
            wrong.append(f"step {missing[0]} of generation {launch.generation} was not replayed")
        for step in (s for s in steps if s in replay.losses):
            apart = difference(launch.losses[step], replay.losses[step])
            worst, compared = max(worst, apart), compared + 1
            if not apart <= TOLERANCE:
                wrong.append(
                    f"step {step} of generation {launch.generation}: loss {launch.losses[step]}, "
                    f"replayed {replay.losses[step]}"
                )
    if not compared and not wrong:
        wrong.append("no step was compared")
    what = f"{count(compared, 'step')} of {count(len(trained), 'generation')}"
    said = f"{what}, at most {worst:.1e} apart"
    return Invariant(name, not wrong, "; ".join(wrong[:3]) or said)


def that_trained(launches: Sequence[Launch]) -> list[Launch]:
    """Those that committed a step."""
    return [launch for launch in launches if launch.losses]


def to_replay(launch: Launch) -> list[int]:
    """The steps of it that are compared."""
    first = launch.resumed_from + 1
    return [step for step in range(first, first + MORPH_STEPS) if step in launch.losses]


def difference(loss: float | None, again: float | None) -> float:
    """Relative; None is a loss that is not finite."""
    if loss is None or again is None:
        return 0.0 if loss is again else float("inf")
    return abs(loss - again) / max(abs(loss), abs(again), 1e-30)


def nothing_left(left: Sequence[str]) -> Invariant:
    """``left``: each process, port and file that should be gone."""
    said = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    return Invariant("no process, port or file left", not left, said or "nothing")


def nobody_died(deaths: Sequence[str]) -> Invariant:
    """``deaths``: agents and controllers that ended though nobody ended them."""
    return Invariant("nothing died by itself", not deaths, ", ".join(deaths) or "nothing")


def went_on(problem: str, step: int) -> Invariant:
    """``problem``: why no steps came once all was mended."""
    return Invariant("the job goes on", not problem, problem or f"to step {step:,}")
