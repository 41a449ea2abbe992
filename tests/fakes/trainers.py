"""Whole generations of real trainers, forked from one warm zygote that meet at one store."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent.launcher import Exit, Trainer, Zygote
from trainer.contract.listing import scan, to_resume
from trainer.contract.progress import Line, Order, StepCommitted
from trainer.contract.spec import (
    Address,
    Program,
    ResumedFrom,
    RunSpec,
    Saving,
    Shape,
    Training,
)
from trainer.contract.topology import even_cuts

PROGRAMS = Path(__file__).parent / "programs"
HOST = "127.0.0.1"


@dataclass
class Rank:
    """What one trainer said, and how it ended."""

    trainer: Trainer
    log: Path
    lines: list[Line] = field(default_factory=list)
    exit: Exit | None = None

    def all(self, kind: type[Any]) -> list[Any]:
        return [line for line in self.lines if isinstance(line, kind)]

    def one(self, kind: type[Any]) -> Any:
        (line,) = self.all(kind)
        return line

    @property
    def steps(self) -> list[StepCommitted]:
        return self.all(StepCommitted)


class Generation:
    """The ranks of one launch, listened to while :meth:`Trainers.wait` runs."""

    def __init__(self, ranks: Sequence[Rank], specs: Sequence[RunSpec]) -> None:
        self.ranks = ranks
        self.specs = specs
        self.changed = asyncio.Event()

    def order(self, order: Order) -> None:
        for rank in self.ranks:
            rank.trainer.send(order)

    @property
    def codes(self) -> list[int | None]:
        return [rank.exit.code if rank.exit else None for rank in self.ranks]


class Trainers:
    """A zygote and a store for as long as the test run needs them.

    ``entry``: a module beside this one, whose ``run`` the zygote forks for trainers.
    """

    def __init__(self, logs: Path, entry: str | None = None) -> None:
        self._runner = asyncio.Runner()
        self._logs = logs
        self._entry = f"{entry}:run" if entry else None
        self._numbers = itertools.count(1)
        self._listening: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        starting = Zygote.start(entry=self._entry, path=Path(__file__).parent)
        self._zygote = self._runner.run(starting)
        self._port = self._runner.run(self._zygote.start_store(HOST))
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._runner.run(self._zygote.close())
        self._runner.close()

    def first_weights(
        self,
        root: Path,
        program: Program,
        training: Training,
        micro_batch: int = 4,
        init_from: str | None = None,
        device: str = "cpu",
    ) -> Generation:
        """Generation 1 of a job; its checkpoint is what the next one starts from."""
        spec = RunSpec(
            kind="first_weights",
            job=str(root),
            generation=1,
            rank=0,
            shape=Shape(depth=1, replicas=1, micro_batch=micro_batch),
            cuts=(),
            program=program,
            training=training,
            saving=Saving(root=str(root)),
            init_from=init_from,
            device=device,
        )
        return self.wait(self.start([spec]))

    def specs(
        self,
        root: Path,
        program: Program,
        training: Training,
        shape: Shape,
        *,
        layers: int,
        step: int | None = None,
        **more: Any,
    ) -> list[RunSpec]:
        """The next generation of the job in ``root``, from its newest checkpoint or ``step``'s."""
        listing = scan(root)
        checkpoint = to_resume(listing, step)
        assert checkpoint is not None
        resumed = ResumedFrom(
            step=checkpoint.step, generation=checkpoint.generation, folder=checkpoint.folder
        )
        values: dict[str, Any] = {
            "kind": "train",
            "job": str(root),
            "generation": listing.newest_generation + 1,
            "shape": shape,
            "cuts": even_cuts(layers, shape.depth),
            "program": program,
            "training": training,
            "store": Address(host=HOST, port=self._port),
            "data_host": HOST,
            "saving": Saving(root=str(root)),
            "load_from": str(root / checkpoint.folder),
            "resumed_from": resumed,
        }
        return [RunSpec(rank=rank, **(values | more)) for rank in range(shape.world)]

    def start(self, specs: Sequence[RunSpec]) -> Generation:
        """Fork a trainer per spec."""
        number = next(self._numbers)

        async def fork() -> Generation:
            ranks = []
            for spec in specs:
                log = self._logs / f"{number}-{spec.rank}.log"
                ranks.append(Rank(await self._zygote.start_trainer(spec, log), log))
            generation = Generation(ranks, specs)
            for rank in ranks:
                task = asyncio.create_task(self._listen(rank, generation))
                self._listening.add(task)
                task.add_done_callback(self._listening.discard)
            return generation

        return self._runner.run(fork())

    def kill(self, rank: Rank) -> None:
        """SIGKILL it."""
        self._runner.run(rank.trainer.kill())

    def wait(
        self, generation: Generation, condition: Any = None, seconds: float = 90
    ) -> Generation:
        """Listen until all ranks are gone, or ``condition(generation)`` holds."""

        def is_over(generation: Generation) -> bool:
            return all(rank.exit for rank in generation.ranks)

        async def listen() -> None:
            while not (condition or is_over)(generation):
                generation.changed.clear()
                await generation.changed.wait()

        async def bounded() -> None:
            async with asyncio.timeout(seconds):
                await listen()

        self._runner.run(bounded())
        return generation

    async def _listen(self, rank: Rank, generation: Generation) -> None:
        events: AsyncIterator[Line | Exit] = rank.trainer.events()
        async for event in events:
            if isinstance(event, Exit):
                rank.exit = event
            else:
                rank.lines.append(event)
            generation.changed.set()
