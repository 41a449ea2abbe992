"""Trainers that begin at once: of the program that ran here last, loaded and forked beforehand.

A *program's zygote* has imported the program and built its dataset. From it are forked the trainers
that *stand by*: as many as ran here, each waiting for its spec. Both are made in a quiet moment,
after a launch has come to its first step, and of one job's program at a time: before another job
`setup` or its user may have changed what was read. When either is not there, or the program forbids
it (it starts threads, say), trainers are forked from the base zygote.

Nothing of it outlives the agent: it hangs on sockets and parent-death signals, as all trainers do.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from agent.launcher import LaunchError, Trainer, Zygote
from trainer.contract import forks
from trainer.contract.spec import Program, RunSpec

_KEPT_SECONDS = 900.0
"""How long a program stays warm of which nothing runs here."""

log = structlog.get_logger()


class Warm:
    """Starts trainers; knows no orders and no jobs."""

    def __init__(
        self,
        base: Zygote,
        log_path: Path,
        threads: int,
        do: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self.base = base
        """The zygote that has loaded no program."""
        self._log_path = log_path
        self._threads = threads
        self._do = do
        self._program: Program | None = None
        self._warm_for: str | None = None
        """The job whose program it is."""
        self._job: str | None = None
        """That of the trainer that was started last."""
        self._own: Zygote | None = None
        self._loading: asyncio.Future[Zygote] | None = None
        self._waiting: list[Trainer] = []
        self._one_at_a_time = asyncio.Lock()
        self._end: asyncio.TimerHandle | None = None

    async def start_trainer(self, spec: RunSpec, log_path: Path) -> Trainer:
        """One that begins with ``spec``; its output is appended there. Raises LaunchError."""
        self._keep()
        self._job = spec.job
        if spec.program != self._program or self._warm_for not in (None, spec.job):
            return await self.base.start_trainer(spec, log_path, self._threads)
        while self._waiting:
            trainer = self._waiting.pop()
            if not trainer.is_gone:
                begin = forks.Begin(spec=spec, log_path=str(log_path), threads=self._threads)
                trainer.begin(begin)
                return trainer
        return await self._zygote.start_trainer(spec, log_path, self._threads)

    def prepare(self, program: Program, count: int) -> None:
        """Make ready for ``count`` trainers of ``program``, which runs here, when there is time."""
        self._keep()
        self._do(self._prepare(program, self._job, count))

    def rest(self) -> None:
        """Nothing runs here any more: stay warm for a while."""
        self._keep()
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(_KEPT_SECONDS, lambda: self._do(self.close()))

    async def close(self) -> None:
        """Let go of all that stands by, or is being loaded; gone on return."""
        self._keep()
        if self._loading:
            self._loading.cancel()
        async with self._one_at_a_time:
            await self._let_go()

    @property
    def standing_by(self) -> tuple[int, ...]:
        """The processes that wait for their spec."""
        return tuple(trainer.pid for trainer in self._waiting if not trainer.is_gone)

    @property
    def _zygote(self) -> Zygote:
        return self._own if self._own and not self._own.lost.is_set() else self.base

    def _keep(self) -> None:
        if self._end:
            self._end.cancel()
            self._end = None

    async def _prepare(self, program: Program, job: str | None, count: int) -> None:
        async with self._one_at_a_time:
            if (program, job) != (self._program, self._warm_for):
                await self._let_go()
                self._warm_for = job
                await self._load(program)
            self._waiting = [trainer for trainer in self._waiting if not trainer.is_gone]
            try:
                while len(self._waiting) < count:
                    self._waiting.append(await self._zygote.stand_by())
            except (LaunchError, OSError) as error:
                log.warning("no trainer stands by", because=str(error))

    async def _load(self, program: Program) -> None:
        self._loading = asyncio.ensure_future(self.base.loading(program, self._log_path))
        try:
            self._own = await self._loading
        except (LaunchError, OSError) as error:
            log.warning("trainers load the program themselves", because=str(error))
        finally:
            self._loading = None
        self._program = program

    async def _let_go(self) -> None:
        self._program = None
        for trainer in self._waiting:
            await trainer.kill()
            await trainer.ended()
        self._waiting = []
        if self._own:
            await self._own.close()
            self._own = None
