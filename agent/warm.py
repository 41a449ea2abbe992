"""Trainers that begin at once: of one job's program, loaded and forked beforehand.

A *program's zygote* has imported the program and built its dataset. From it are forked the trainers
that *stand by*, each waiting for its spec. Both are made in a quiet moment: where trainers run,
after their launch has come to its first step; on a spare, when the controller says so. They are one
job's alone: before another job `setup` or its user may have changed what was read. When either is
not there, or the program forbids it (it starts threads, say), trainers are forked from the base
zygote.

Nothing of it outlives the agent: it hangs on sockets and parent-death signals, as all trainers do.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agent.launcher import BrokenProgramError, LaunchError, Trainer, Zygote
from trainer.contract import forks
from trainer.contract.spec import Program, RunSpec

log = structlog.get_logger()


@dataclass
class _Kept:
    """What is warm."""

    job: str
    program: Program
    zygote: Zygote | None = None
    """That of the program; None while it is loaded, or when trainers cannot be forked from it."""
    waiting: list[Trainer] = field(default_factory=list)

    def is_for(self, job: str, program: Program) -> bool:
        return (self.job, self.program) == (job, program)


class Warm:
    """Starts trainers; knows no orders."""

    def __init__(self, base: Zygote, log_path: Path, threads: int) -> None:
        self.base = base
        """The zygote that has loaded no program."""
        self._log_path = log_path
        self._threads = threads
        self._kept: _Kept | None = None
        self._loading: asyncio.Future[Zygote] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Of what was warm before; it goes on when who asked for it is cancelled."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def job(self) -> str | None:
        """Whose program is warm, or is being loaded."""
        return self._kept.job if self._kept else None

    @property
    def standing_by(self) -> tuple[int, ...]:
        """The processes that wait for their spec."""
        waiting = self._kept.waiting if self._kept else ()
        return tuple(trainer.pid for trainer in waiting if not trainer.is_gone)

    async def start_trainer(self, spec: RunSpec, log_path: Path) -> Trainer:
        """One that begins with ``spec``; its output is appended there. Raises LaunchError."""
        kept = self._kept
        if kept is None or not kept.is_for(spec.job, spec.program):
            return await self.base.start_trainer(spec, log_path, self._threads)
        while kept.waiting:
            trainer = kept.waiting.pop()
            if not trainer.is_gone:
                begin = forks.Begin(spec=spec, log_path=str(log_path), threads=self._threads)
                trainer.begin(begin)
                return trainer
        return await self._zygote_of(kept).start_trainer(spec, log_path, self._threads)

    async def prepare(self, job: str, program: Program, count: int) -> None:
        """Have ``count`` trainers of ``program`` stand by, in the place of another job's. Raises
        BrokenProgramError.
        """
        if self._kept and not self._kept.is_for(job, program):
            self._stop_loading()
        async with self._one_at_a_time:
            if self._kept is None or not self._kept.is_for(job, program):
                await self._let_go()
                self._kept = _Kept(job, program)
                await self._load(self._kept)
            await self._stand_by(self._kept, count)

    async def let_go(self) -> None:
        """End all that stands by, or is being loaded; gone on return."""
        self._stop_loading()
        async with self._one_at_a_time:
            await self._let_go()

    def _zygote_of(self, kept: _Kept) -> Zygote:
        return kept.zygote if kept.zygote and not kept.zygote.lost.is_set() else self.base

    def _stop_loading(self) -> None:
        if self._loading:
            self._loading.cancel()

    async def _load(self, kept: _Kept) -> None:
        self._loading = asyncio.ensure_future(self.base.loading(kept.program, self._log_path))
        try:
            kept.zygote = await self._loading
        except (BrokenProgramError, asyncio.CancelledError):
            self._kept = None
            raise
        except (LaunchError, OSError) as error:
            log.warning("trainers load the program themselves", because=str(error))
        finally:
            self._loading = None

    async def _stand_by(self, kept: _Kept, count: int) -> None:
        kept.waiting = [trainer for trainer in kept.waiting if not trainer.is_gone]
        try:
            while len(kept.waiting) < count:
                kept.waiting.append(await self._zygote_of(kept).stand_by())
        except (LaunchError, OSError) as error:
            log.warning("no trainer stands by", because=str(error))

    async def _let_go(self) -> None:
        if self._kept:
            self._ending = asyncio.create_task(_end(self._kept))
            self._kept = None
        if self._ending:
            await asyncio.shield(self._ending)


async def _end(kept: _Kept) -> None:
    for trainer in kept.waiting:
        await trainer.kill()
        await trainer.ended()
    if kept.zygote:
        await kept.zygote.close()
