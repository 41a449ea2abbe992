"""One generation whose ranks all run here: start them, hear them, see that they agree, end them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.launcher import Exit, Trainer, Zygote
from agent.logs import tail
from trainer.contract.progress import (
    ExitCode,
    Failed,
    Finished,
    Halted,
    Line,
    NonFinite,
    StepCommitted,
    Stopped,
)
from trainer.contract.spec import RunSpec

LAST_WORDS_SECONDS = 3.0
"""How long the others may go on after the first trouble: causes are told late."""

Hear = Callable[[int, Line], None]


class SoloError(Exception):
    """Why the generation did not reach its end, as one sentence for a person."""


async def run(
    zygote: Zygote,
    specs: Sequence[RunSpec],
    logs: Path,
    hear: Hear,
    agreed: Callable[[StepCommitted], None],
) -> None:
    """Run ``specs``, the ranks of one generation, to their end; none is left however it ends.

    ``hear`` gets every line with its rank, ``agreed`` each step once all ranks have reported it
    alike. Raises SoloError, LaunchError.
    """
    events: asyncio.Queue[tuple[int, Line | Exit]] = asyncio.Queue()
    heard = Heard(len(specs), logs, hear, agreed)
    trainers: list[Trainer] = []
    listening: list[asyncio.Task[None]] = []
    try:
        for spec in specs:
            trainers.append(await zygote.start_trainer(spec, log_of(logs, spec.rank)))
            listening.append(asyncio.create_task(_listen(spec.rank, trainers[-1], events)))
        await _hear_all(events, heard)
    finally:
        for trainer in trainers:
            await trainer.kill()
        await asyncio.gather(*listening)
    if heard.in_trouble:
        raise SoloError(heard.why())


def log_of(logs: Path, rank: int) -> Path:
    """Where the output of ``rank`` is."""
    return logs / f"rank-{rank}.log"


async def _listen(
    rank: int, trainer: Trainer, events: asyncio.Queue[tuple[int, Line | Exit]]
) -> None:
    async for event in trainer.events():
        events.put_nowait((rank, event))


async def _hear_all(events: asyncio.Queue[tuple[int, Line | Exit]], heard: "Heard") -> None:
    """Until all ranks have ended, or until the last words after the first trouble."""
    deadline = None
    try:
        while not heard.all_ended:
            async with asyncio.timeout_at(deadline):
                rank, event = await events.get()
            heard.take(rank, event)
            if heard.in_trouble and deadline is None:
                deadline = asyncio.get_running_loop().time() + LAST_WORDS_SECONDS
    except TimeoutError:
        pass


class Heard:
    """What the ranks have said so far."""

    def __init__(
        self, world: int, logs: Path, hear: Hear, agreed: Callable[[StepCommitted], None]
    ) -> None:
        self._world = world
        self._logs = logs
        self._hear = hear
        self._agreed = agreed
        self._steps: dict[int, dict[int, StepCommitted]] = {}
        self._failed: dict[int, Failed] = {}
        self._halted: dict[int, Halted] = {}
        self._non_finite: list[NonFinite] = []
        self._stopped: set[int] = set()
        self._finished: set[int] = set()
        self._exits: dict[int, Exit] = {}

    @property
    def all_ended(self) -> bool:
        return len(self._exits) == self._world

    @property
    def in_trouble(self) -> bool:
        odd = any(self._is_early(rank) for rank in self._exits)
        untold = self.all_ended and self._steps
        stands_still = len(self._stopped) == self._world
        return bool(odd or untold or stands_still or self._failed or self._halted)

    def take(self, rank: int, event: Line | Exit) -> None:
        if isinstance(event, Exit):
            self._exits[rank] = event
            return
        self._hear(rank, event)
        match event:
            case StepCommitted():
                self._commit(rank, event)
            case Failed():
                self._failed[rank] = event
            case Halted():
                self._halted[rank] = event
            case NonFinite():
                self._non_finite.append(event)
            case Stopped():
                self._stopped.add(rank)
            case Finished():
                self._finished.add(rank)

    def _is_early(self, rank: int) -> bool:
        """Whether it ended before it was done; a program that exits may well do so with code 0."""
        return self._exits[rank] != Exit(code=ExitCode.DONE) or rank not in self._finished

    def _commit(self, rank: int, line: StepCommitted) -> None:
        of_step = self._steps.setdefault(line.step, {})
        of_step[rank] = line
        if len(of_step) < self._world:
            return
        lowest = min(of_step)
        for other, said in of_step.items():
            if said.model_copy(update={"seconds": of_step[lowest].seconds}) != of_step[lowest]:
                raise SoloError(
                    f"Ranks {lowest} and {other} disagree about step {line.step}: "
                    f"{_numbers(of_step[lowest])} against {_numbers(said)}."
                )
        self._agreed(of_step[lowest])
        del self._steps[line.step]

    def why(self) -> str:
        """The cause of the trouble; an effect (a lost peer) only when nothing else was told."""
        told = {r: f for r, f in self._failed.items() if f.code != ExitCode.PEER_LOST}
        if told:
            return next(iter(told.values())).message
        for said in self._non_finite:
            return (
                f"Step {said.step} is not finite: {said.what} (replica {said.replica}, "
                f"stage {said.stage}). All is as it was after step {said.step - 1}."
            )
        for rank, exit_ in self._exits.items():
            if rank not in self._failed and self._is_early(rank) and exit_.code != ExitCode.LEFT:
                return _sentence(rank, exit_, tail(log_of(self._logs, rank)))
        if self._failed:
            return next(iter(self._failed.values())).message
        if self._halted:
            rank, halted = next(iter(self._halted.items()))
            return f"Rank {rank} halted after step {halted.applied}: {halted.cause}"
        if self._steps:
            return f"Not all ranks reported step {min(self._steps)}."
        return "The ranks left before their end."


def _sentence(rank: int, exit_: Exit, log_tail: str) -> str:
    lines = [line for line in log_tail.splitlines() if line.strip()]
    last = f"; its last line: {lines[-1].strip()}" if lines else " and printed nothing"
    early = " before it was done" if exit_.code == ExitCode.DONE else ""
    return f"Rank {rank} ended with {exit_}{early}{last}"


def _numbers(line: StepCommitted) -> str:
    return f"loss {line.loss!r}, gradient norm {line.grad_norm!r}, {line.sample_ids_hash}"
