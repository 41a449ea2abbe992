"""What the survivors of a loss hold together, and who saves what. PURE.

    best      the greatest step that any survivor saw voted
    behind    survivors one step behind, with whole gradients: handed the vote, they apply it too
    holders   survivors that stand at best; the others' state is of no use
    shares    each layer that is not written yet goes to one of its holders, the least laden

A vote can succeed on some survivors and fail on others, never more than one step apart. If no
survivor saw it, all stand at the same step, and what only the dead applied is done again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from controller.core import resume
from controller.core.states import GenerationState
from controller.core.world import Generation, Job, Rules, Seat
from trainer.contract.checkpoints import FolderName
from trainer.contract.progress import Ballot, Halted
from trainer.contract.topology import Seat as Place

KIND = "salvage"
_STEPPING = (GenerationState.RUNNING, GenerationState.DRAINING)


# --- Before: whether to try --------------------------------------------------------------------


def is_worth_it(job: Job, generation: Generation, left: Collection[int], rules: Rules) -> bool:
    """Whether the ranks ``left`` may cover every layer, and saving takes less than the steps at
    risk took. The time in which losses are gathered costs nothing.
    """
    if generation.kind != "train" or generation.state not in _STEPPING or job.costs is None:
        return False
    if not covers_every_stage(generation, left):
        return False
    gain = steps_at_risk(job, generation.committed) * generation.step_seconds
    return gain > 0 and predicted_seconds(job, len(left)) < gain + rules.coalesce


def covers_every_stage(generation: Generation, left: Iterable[int]) -> bool:
    """Whether of each stage at least one replica is among ``left``."""
    shape = generation.shape
    return shape is not None and len({Place.of(r, shape).stage for r in left}) == shape.depth


def steps_at_risk(job: Job, step: int) -> int:
    """How many steps up to ``step`` no checkpoint has."""
    newest = resume.newest(job)
    return step - newest.step if newest else step


def predicted_seconds(job: Job, writers: int) -> float:
    """For so many ranks to write all layers in equal shares."""
    if job.costs is None:
        return 0.0
    saved = job.costs.state_copies - 1  # no gradients
    rate = job.save_rate or job.costs.moving.write_bytes_per_second
    num_bytes = saved * sum(layer.parameter_bytes for layer in job.costs.layers)
    return num_bytes / max(1, writers) / rate


# --- After: what to do, once they stand still --------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A rank that stands still with its state intact."""

    seat: Seat
    halted: Halted


def standing_still(seats: Iterable[Seat]) -> list[Standing]:
    """Of ``seats``, who has halted and can do what it is told."""
    return [
        Standing(seat, seat.halted)
        for seat in seats
        if seat.halted and not seat.halted.torn and seat.exit is None and not seat.refused
    ]


def best_step(survivors: Iterable[Standing]) -> int:
    """The greatest step that any of them saw voted; 0: there is none."""
    return max((max(s.halted.applied, s.halted.vote_step or 0) for s in survivors), default=0)


def behind(survivors: Sequence[Standing], best: int) -> tuple[list[Seat], Ballot]:
    """Who can still be brought to ``best``, and by which vote."""
    votes = (s.halted.ballot for s in survivors if s.halted.vote_step == best)
    ballot = next((vote for vote in votes if vote is not None), None)
    if ballot is None:
        return [], ()
    late = ((s.halted.applied, s.halted.prepared) == (best - 1, best) for s in survivors)
    return [s.seat for s, is_late in zip(survivors, late, strict=True) if is_late], ballot


def written(job: Job, generation: Generation, step: int) -> frozenset[int]:
    """The layers of its salvage of ``step`` that are durable."""
    name = str(FolderName(step, generation.number, KIND))
    return next((c.layers for c in job.checkpoints if c.folder == name), frozenset())


def shares(
    job: Job, holders: Sequence[Standing], layers: Iterable[int]
) -> dict[int, tuple[int, ...]] | None:
    """Rank -> the layers that it is to write; None: one has no holder. Who was given
    more bytes before is given less now.
    """
    assert job.costs is not None
    size = [layer.parameter_bytes for layer in job.costs.layers]
    able = {s.seat.rank: set(s.halted.holds) for s in holders}
    load = {s.seat.rank: sum(size[layer] for layer in s.seat.saving) for s in holders}
    dealt: dict[int, list[int]] = {}
    for layer in sorted(layers, key=lambda layer: (-size[layer], layer)):
        ranks = [rank for rank, held in able.items() if layer in held]
        if not ranks:
            return None
        least = min(ranks, key=lambda rank: (load[rank], rank))
        load[least] += size[layer]
        dealt.setdefault(least, []).append(layer)
    return {rank: tuple(sorted(dealt[rank])) for rank in sorted(dealt)}
