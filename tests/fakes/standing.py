"""What a controller does with trainers that stand still: hand the vote on, have layers saved."""

from collections.abc import Iterable
from pathlib import Path

from tests.fakes.trainers import Generation, Rank, Trainers
from trainer.contract.listing import scan
from trainer.contract.progress import Forward, Halted, PartWritten, Phase, PhaseBegun, Save

Contents = set[tuple[int, str]]
"""(layer, hash) of checkpoint files: bit-equal state has equal ones."""


def stands_still(rank: Rank) -> bool:
    return PhaseBegun(phase=Phase.HALTED) in rank.lines


def newest(rank: Rank) -> Halted:
    """Where it stands."""
    halted = rank.all(Halted)[-1]
    assert isinstance(halted, Halted)
    return halted


def survivors(generation: Generation) -> list[Rank]:
    return [rank for rank in generation.ranks if rank.all(Halted)]


def all_halted(generation: Generation, *dead: int) -> bool:
    ranks = [rank for n, rank in enumerate(generation.ranks) if n not in dead]
    return all(stands_still(rank) and rank.all(Halted) for rank in ranks)


def roll_forward(trainers: Trainers, generation: Generation) -> tuple[int, int]:
    """Bring all survivors, who stand still, to the newest step that any of them saw voted: that
    step, and how many were behind.
    """
    ranks = survivors(generation)
    best = max(newest(rank).applied for rank in ranks)
    behind = [rank for rank in ranks if newest(rank).applied < best]
    ballot = next((newest(r).ballot for r in ranks if newest(r).vote_step == best), None)
    for rank in behind:
        assert ballot is not None and newest(rank).prepared == best
        rank.trainer.send(Forward(step=best, ballot=ballot))
    trainers.wait(generation, lambda _: all(newest(rank).applied == best for rank in ranks), 20)
    return best, len(behind)


def salvage(
    trainers: Trainers, generation: Generation, layers: Iterable[tuple[Rank, tuple[int, ...]]]
) -> None:
    """Have each rank write its layers, one order a rank; on return all are durable."""
    asked = list(layers)
    for rank, wanted in asked:
        rank.trainer.send(Save(layers=wanted))

    def is_written(rank: Rank, wanted: tuple[int, ...]) -> bool:
        return any(
            part.folder.endswith(".salvage") and set(wanted) <= set(part.layers)
            for part in rank.all(PartWritten)
        )

    trainers.wait(generation, lambda _: all(is_written(*one) for one in asked), 20)


def hashes(root: Path, step: int, *, kind: str = "", generation: int | None = None) -> Contents:
    """What the parts at ``step`` hold; as many as there are layers when all writers agree."""
    return {
        (file.layer, file.content_hash)
        for part in scan(root).parts
        if (part.step, part.kind) == (step, kind) and generation in (None, part.generation)
        for file in part.files
    }
