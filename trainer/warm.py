"""A program that a zygote loads once, so that the trainers forked from it need not.

What a fork of it starts with: the program's file imported, the dataset built, the layers drawn on
the meta device. Each trainer has its own copy of all that, by the kernel's copy on write.
"""

from dataclasses import dataclass

from trainer.contract.spec import Program
from trainer.program import LoadedProgram, load
from trainer.stages import Model


@dataclass(frozen=True)
class Loaded:
    """A program, ready to train."""

    program: LoadedProgram
    model: Model


_kept: list[tuple[Program, Loaded]] = []


def keep(program: Program) -> None:
    """Load ``program`` for all forks of this process. Raises ProgramError."""
    loaded = _load(program)
    len(loaded.program.dataset)
    _kept.append((program, loaded))


def loaded(program: Program) -> Loaded:
    """What was kept, else loaded now. Raises ProgramError."""
    kept = next((one for known, one in _kept if known == program), None)
    return kept or _load(program)


def _load(program: Program) -> Loaded:
    found = load(program)
    return Loaded(found, Model.draw(found))
