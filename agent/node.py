"""What runs on this node: carries out what :mod:`agent.decide` answers, and reports what became of
it. Knows no controller and no HTTP; orders come in by :meth:`Node.take`, reports go out by a call.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from agent import folder, wire
from agent.bundles import BundleError, Bundles, placed
from agent.client import ControllerError
from agent.decide import Answer, CarryOut, Kill, Runner, Standing, decide, is_for
from agent.launcher import Exit, LaunchError, Trainer, Zygote
from agent.logs import tail
from agent.sweep import Sessions
from trainer.contract import progress
from trainer.contract.checkpoints import write_done
from trainer.contract.progress import (
    Halted,
    Leave,
    Line,
    Phase,
    PhaseBegun,
    StepCommitted,
    Stopped,
)
from trainer.contract.spec import RunSpec

_LOGS_KEPT = 64
"""Of earlier trainers, in the state folder."""

_FETCH = "fetch"
"""The phase before there is a process: its bundle is fetched."""

log = structlog.get_logger()


@dataclass
class Log:
    """One trainer's log and how far it is shipped."""

    job: str
    generation: int
    rank: int
    path: Path
    shipped: int = 0
    is_whole: bool = False
    """The trainer is gone: nothing more will be written."""


@dataclass(eq=False)
class _Seat:
    """A trainer from the order to start it until it is gone."""

    spec: RunSpec
    log: Log
    trainer: Trainer | None = None
    phase: str = _FETCH
    step: int = 0
    is_ending: bool = False

    @property
    def runner(self) -> Runner:
        return Runner(self.spec.job, self.spec.generation, self.spec.rank, self.is_ending)


class Node:
    """The trainers here and the orders about them."""

    def __init__(
        self,
        zygote: Zygote,
        bundles: Bundles,
        sessions: Sessions,
        logs: Path,
        threads: int,
        report: Callable[[wire.ReportBody], None],
        do: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """``do`` runs a task of the daemon's, whose failure is the daemon's."""
        self.logs: list[Log] = []
        """Those that are not shipped whole; who ships them takes them off."""
        self._zygote = zygote
        self._bundles = bundles
        self._sessions = sessions
        self._folder = logs
        self._threads = threads
        self._report = report
        self._standing = Standing()
        self._seats: list[_Seat] = []
        self._do = do
        self._removed = asyncio.Event()

    def take(self, orders: tuple[wire.Order, ...]) -> None:
        """Take orders in, again or for the first time, and go on."""
        self._standing = self._standing.taking({order.number: order.body for order in orders})
        self._go_on()

    def forget_orders(self) -> None:
        """The controller's numbers begin anew."""
        self._standing = Standing()

    def running(self) -> tuple[wire.RunningTrainer, ...]:
        """What runs here now."""
        return tuple(
            wire.RunningTrainer(
                job=seat.spec.job,
                generation=seat.spec.generation,
                rank=seat.spec.rank,
                phase=seat.phase,
                step=seat.step,
            )
            for seat in self._seats
        )

    async def leave(self, seconds: float) -> None:
        """Tell all trainers to leave; kill those that are still there after ``seconds``."""
        for seat in tuple(self._seats):
            if seat.trainer:
                seat.trainer.send(Leave())
            else:
                self._end(seat)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until_empty()
        await self.kill_all()

    async def kill_all(self) -> None:
        """End all trainers; they are gone on return."""
        for seat in tuple(self._seats):
            self._end(seat)
        await self._until_empty()

    async def _until_empty(self) -> None:
        while self._seats:
            self._removed.clear()
            await self._removed.wait()

    def _go_on(self) -> None:
        for action in decide(self._standing, [seat.runner for seat in self._seats]):
            match action:
                case Kill(runner):
                    self._end(next(seat for seat in self._seats if seat.runner == runner))
                case Answer(number, error):
                    self._standing = self._standing.settling(number)
                    self._answer(number, error)
                case CarryOut(number, body):
                    self._standing = self._standing.settling(number)
                    self._carry_out(number, body)

    def _answer(self, number: int, error: str | None = None) -> None:
        if error:
            log.warning("order not carried out", order=number, because=error)
        self._report(wire.OrderDone(number=number, error=error))

    def _carry_out(self, number: int, body: wire.OrderBody) -> None:
        match body:
            case wire.Start():
                name = f"{body.spec.job}.g{body.spec.generation}.r{body.spec.rank}.log"
                place = (body.spec.job, body.spec.generation, body.spec.rank)
                seat = _Seat(body.spec, Log(*place, self._folder / name))
                self._seats.append(seat)
                self._do(self._run(number, body, seat))
            case _ if isinstance(body, wire.Passed):
                self._pass_on(number, body)
            case wire.Look():
                self._do(self._look(number, body))
            case wire.Delete():
                self._do(self._change(number, partial(folder.delete, body)))
            case wire.MarkDone():
                done = partial(write_done, body.root, body.step, body.folder)
                self._do(self._change(number, done))

    def _pass_on(self, number: int, body: wire.Passed) -> None:
        meant = [s.trainer for s in self._seats if s.trainer and is_for(body, s.runner)]
        for trainer in meant:
            trainer.send(_order_of(body))
        self._answer(number, None if meant else "the trainer it is for is not there yet")

    async def _look(self, number: int, order: wire.Look) -> None:
        self._report(await asyncio.to_thread(folder.look, number, order))

    async def _change(self, number: int, change: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(change)
        except (OSError, ValueError) as error:
            self._answer(number, str(error))
        else:
            self._answer(number)

    async def _run(self, number: int, start: wire.Start, seat: _Seat) -> None:
        try:
            spec = await self._prepared(start)
            if seat.is_ending:
                raise LaunchError("it was ended before it began")
            seat.phase = Phase.BOOT
            trainer = await self._zygote.start_trainer(spec, seat.log.path, self._threads)
        except (BundleError, ControllerError, LaunchError, OSError) as error:
            self._answer(number, str(error))
            self._remove(seat)
            return
        self._answer(number)
        seat.trainer = trainer
        self._sessions.add(trainer.pid)
        self.logs.append(seat.log)
        if seat.is_ending:
            await trainer.kill()
        async for event in trainer.events():
            self._heard(seat, event)
        self._sessions.remove(trainer.pid)
        self._remove(seat)

    async def _prepared(self, start: wire.Start) -> RunSpec:
        self._make_room_for_a_log()
        if start.bundle is None:
            return start.spec
        unpacked = await self._bundles.folder_of(start.bundle)
        return start.spec.model_copy(update={"program": placed(start.spec.program, unpacked)})

    def _heard(self, seat: _Seat, event: Line | Exit) -> None:
        job, generation, rank = seat.spec.job, seat.spec.generation, seat.spec.rank
        match event:
            case Exit():
                seat.log.is_whole = True
                self._report(
                    wire.Exited(
                        job=job,
                        generation=generation,
                        rank=rank,
                        code=event.code,
                        signal=event.signal,
                        log_tail=tail(seat.log.path),
                    )
                )
                log.info("trainer ended", job=job, generation=generation, rank=rank, by=str(event))
                return
            case PhaseBegun():
                seat.phase = event.phase
            case StepCommitted():
                seat.phase, seat.step = Phase.STEP, event.step
            case Halted() | Stopped():
                seat.phase = Phase.HALTED
        self._report(wire.Said(job=job, generation=generation, rank=rank, line=event))

    def _end(self, seat: _Seat) -> None:
        seat.is_ending = True
        if seat.trainer:
            self._do(seat.trainer.kill())
        elif seat.phase == _FETCH:  # nothing lives yet; what is being fetched is not waited for
            self._remove(seat)

    def _remove(self, seat: _Seat) -> None:
        """Nothing of it is left: what waited for that can go on."""
        if seat in self._seats:
            self._seats.remove(seat)
            self._removed.set()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _make_room_for_a_log(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        shipping = {shipped.path for shipped in self.logs}
        old = [path for path in self._folder.iterdir() if path not in shipping]
        for path in sorted(old, key=lambda p: p.stat().st_mtime)[:-_LOGS_KEPT]:
            path.unlink(missing_ok=True)


def _order_of(body: wire.Passed) -> progress.Order:
    """What the trainer is told."""
    match body:
        case wire.HaltOrder():
            return progress.Halt()
        case wire.DrainOrder():
            return progress.Stop()
        case wire.SaveNowOrder():
            return progress.SaveNow()
        case wire.ForwardOrder():
            return progress.Forward(step=body.step, ballot=body.ballot)
        case wire.SaveLayers():
            return progress.Save(layers=body.layers)
