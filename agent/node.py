"""What runs on this node: carries out what :mod:`agent.decide` answers, and reports what became of
it. Knows no controller and no HTTP; orders come in by :meth:`Node.take`, reports go out by a call.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agent import folder, wire
from agent.bundles import BundleError, Bundles, placed
from agent.client import ControllerError
from agent.decide import Answer, CarryOut, Kill, Runner, Standing, decide, is_for
from agent.launcher import BrokenProgramError, Exit, LaunchError, Trainer
from agent.logs import tail
from agent.paths import unreached
from agent.patience import in_thread
from agent.setup import SetupError, Setups
from agent.spare import Spare
from agent.staging import Staging, Uploads
from agent.sweep import Sessions
from agent.warm import Warm
from trainer.contract import progress
from trainer.contract.progress import (
    ExitCode,
    Failed,
    Finished,
    Halted,
    Leave,
    Line,
    NonFinite,
    PartWritten,
    Phase,
    PhaseBegun,
    Stay,
    StepCommitted,
    Stopped,
)
from trainer.contract.remote import StoreError, is_url
from trainer.contract.spec import Program, RunSpec

_LOGS_KEPT = 64
"""Of earlier trainers, in the state folder."""

_FETCH = "fetch"
"""The phase before there is a process: its bundle is fetched."""

_LOOK_SECONDS = 0.05
_STORE_SECONDS, _FOLDER_SECONDS = 60.0, 600.0
"""For a listing or a deletion in a store, and in a folder."""

_STANDING = (PhaseBegun, StepCommitted, Halted, Stopped, NonFinite, Failed, Finished)
"""Lines that say how a trainer stands, as long as it lives."""

_T = TypeVar("_T")

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
    bundle: str | None = None
    """The digest of what its program came in."""
    uploads: Uploads | None = None
    """When its checkpoints go to a store."""
    trainer: Trainer | None = None
    program: Program | None = None
    """As it lies on this machine, once it does."""
    phase: str = _FETCH
    step: int = 0
    said: dict[str, Line] = field(default_factory=dict)
    """The newest of each kind that tells how it stands."""
    is_ending: bool = False
    setting_up: "asyncio.Task[None] | None" = None

    @property
    def runner(self) -> Runner:
        return Runner(self.spec.job, self.spec.generation, self.spec.rank, self.is_ending)


class Node:
    """The trainers here and the orders about them."""

    def __init__(
        self,
        warm: Warm,
        bundles: Bundles,
        sessions: Sessions,
        staging: Staging,
        logs: Path,
        report: Callable[[wire.ReportBody], None],
        do: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """``do`` runs a task of the daemon's, whose failure is the daemon's."""
        self.logs: list[Log] = []
        """Those that are not shipped whole; who ships them takes them off."""
        self._warm = warm
        self._bundles = bundles
        self._setups = Setups(warm.base, sessions)
        self._spare = Spare(bundles, self._setups, warm, logs / "spare.log")
        self._sessions = sessions
        self._staging = staging
        self._uploads: list[Uploads] = []
        self._folder = logs
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
        """The controller's numbers begin anew; those of generations never do."""
        self._standing = Standing(newest=self._standing.newest)

    def running(self, *, whole: bool = False) -> tuple[wire.RunningTrainer, ...]:
        """What runs here now; ``whole``: with all that somebody who knows nothing of it needs."""
        return tuple(
            wire.RunningTrainer(
                job=seat.spec.job,
                generation=seat.spec.generation,
                rank=seat.spec.rank,
                phase=seat.phase,
                step=seat.step,
                spec=seat.spec if whole else None,
                said=tuple(seat.said.values()) if whole else (),
            )
            for seat in self._seats
            if not (whole and seat.is_ending)
        )

    @property
    def warm_for(self) -> str | None:
        """The job that trainers stand by for, or that this machine gets ready for."""
        return self._spare.job

    @property
    def is_uploading(self) -> bool:
        """Whether a part of a checkpoint is on its way to a store."""
        return any(not uploads.is_idle for uploads in self._uploads)

    def stay(self) -> None:
        """Nobody can order anything now: who stands still keeps what it holds."""
        for seat in self._seats:
            if seat.trainer and seat.phase == Phase.HALTED:
                seat.trainer.send(Stay())

    async def leave(self, seconds: float) -> None:
        """Tell all trainers to leave; kill those that are still there after ``seconds``.

        What is on its way to a store has as long.
        """
        for seat in tuple(self._seats):
            if seat.trainer:
                seat.trainer.send(Leave())
            else:
                self._end(seat)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until_empty()
                await asyncio.gather(*(uploads.until_idle() for uploads in self._uploads))
        await self.kill_all()

    async def kill_all(self) -> None:
        """End all trainers, those that stand by too, and setups; they are gone on return."""
        for seat in tuple(self._seats):
            self._end(seat)
        await self._setups.end_all()
        await self._until_empty()
        await self._spare.let_go()

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
                seat = _Seat(body.spec, Log(*place, self._folder / name), body.bundle)
                self._seats.append(seat)
                if self.warm_for not in (None, body.spec.job):
                    self._do(self._spare.let_go())
                self._do(self._run(number, body, seat))
            case wire.Prepare():
                self._do(self._prepare(number, body))
            case wire.Release():
                self._do(self._release(number, body))
            case _ if isinstance(body, wire.Passed):
                self._pass_on(number, body)
            case wire.Look():
                self._do(self._look(number, body))
            case wire.Connect():
                self._do(self._connect(number, body))
            case wire.Delete():
                self._do(self._change(number, body.root, partial(folder.delete, body)))
            case wire.MarkDone():
                self._do(self._change(number, body.root, partial(folder.mark_done, body)))

    def _pass_on(self, number: int, body: wire.Passed) -> None:
        meant = [s.trainer for s in self._seats if s.trainer and is_for(body, s.runner)]
        for trainer in meant:
            if isinstance(body, wire.DumpOrder):
                trainer.dump()
            else:
                trainer.send(_order_of(body))
        self._answer(number, None if meant else "the trainer it is for is not there yet")

    async def _prepare(self, number: int, order: wire.Prepare) -> None:
        self._answer(number, None if self._seats else await self._spare.prepare(order))
        if order.bundle:
            await self._bundles.keep_few(self._needed_bundles)

    async def _release(self, number: int, order: wire.Release) -> None:
        if self.warm_for == order.job:
            await self._spare.let_go()
        if order.root is None:
            self._answer(number)
        else:
            await self._change(
                number, order.root, partial(folder.tidy, order.root, order.generation)
            )

    async def _look(self, number: int, order: wire.Look) -> None:
        try:
            looked = await _at(order.root, partial(folder.look, number, order))
        except StoreError as error:
            about = {"number": number, "job": order.job, "generation": order.generation}
            looked = wire.Looked.model_validate({**about, "error": str(error)})
        self._report(looked)

    async def _connect(self, number: int, order: wire.Connect) -> None:
        """Say which peers are not reached."""
        self._report(
            wire.Connected(
                number=number,
                job=order.job,
                generation=order.generation,
                unreached=await unreached(order.peers),
            )
        )

    async def _change(self, number: int, root: str, change: Callable[[], None]) -> None:
        try:
            await _at(root, change)
        except (OSError, ValueError, StoreError) as error:
            self._answer(number, str(error))
        else:
            self._answer(number)

    async def _run(self, number: int, start: wire.Start, seat: _Seat) -> None:
        try:
            spec = await self._staged(await self._prepared(start, seat), seat)
            _go_on_unless_ended(seat)
            seat.phase, seat.program = Phase.BOOT, spec.program
            trainer = await self._warm.start_trainer(spec, seat.log.path)
        except StoreError as error:
            self._could_not_begin(number, seat, ExitCode.CHECKPOINT_UNREACHABLE, str(error))
            return
        except SetupError as error:
            self._could_not_begin(number, seat, ExitCode.SETUP_FAILED, str(error))
            return
        except (BundleError, ControllerError, LaunchError, OSError) as error:
            self._answer(number, str(error))
            self._remove(seat)
            return
        self._answer(number)
        seat.trainer = trainer
        self._sessions.add(trainer.pid)
        self._ship(seat.log)
        if seat.is_ending:
            await trainer.kill()
        async for event in trainer.events():
            if isinstance(event, Finished):
                await self._until_uploaded(seat)
            self._heard(seat, event)
        self._sessions.remove(trainer.pid)
        self._remove(seat)

    async def _until_uploaded(self, seat: _Seat) -> None:
        """Wait for what the trainer has written to be in the store, unless it is to end."""
        while seat.uploads and not seat.uploads.is_idle and not seat.is_ending:
            await asyncio.sleep(_LOOK_SECONDS)

    async def _prepared(self, start: wire.Start, seat: _Seat) -> RunSpec:
        self._make_room_for_a_log()
        if start.bundle is None:
            return start.spec
        unpacked = await self._bundles.folder_of(start.bundle)
        if start.setup and not self._setups.is_done(start.setup, unpacked):
            await self._set_up(start.setup, unpacked, seat)
        return placed(start.spec, unpacked)

    async def _set_up(self, setup: wire.Setup, unpacked: Path, seat: _Seat) -> None:
        _go_on_unless_ended(seat)
        self._heard(seat, PhaseBegun(phase=Phase.SETUP))
        self._ship(seat.log)
        waiting = self._setups.wait_for(setup, unpacked, seat.log.path)
        seat.setting_up = asyncio.create_task(waiting)
        try:
            await asyncio.wait([seat.setting_up])
        finally:
            seat.setting_up.cancel()
        _go_on_unless_ended(seat)
        seat.setting_up.result()

    def _ship(self, written: Log) -> None:
        if written not in self.logs:
            self.logs.append(written)

    async def _staged(self, spec: RunSpec, seat: _Seat) -> RunSpec:
        """The spec with folders of this machine in it, when its own are in a store."""
        staging = self._staging.of(spec)
        if staging is None:
            return spec
        living = [other.uploads for other in self._seats]
        self._uploads = [one for one in self._uploads if not one.is_idle or one in living]
        self._do(self._staging.keep_only({other.spec.job for other in self._seats}))
        seat.uploads = Uploads(staging, spec, partial(self._say, seat), self._do)
        self._uploads.append(seat.uploads)
        return await staging.prepared(spec, lambda: not seat.is_ending)

    def _could_not_begin(self, number: int, seat: _Seat, code: ExitCode, because: str) -> None:
        """Told as the end of a trainer, though there was none."""
        if seat.is_ending:
            self._answer(number, because)
        else:
            self._answer(number)
            message = f"rank {seat.spec.rank}: {because}"
            self._heard(seat, Failed(code=code, message=message, details=tail(seat.log.path)))
            self._heard(seat, Exit(code=code))
        self._remove(seat)

    def _heard(self, seat: _Seat, event: Line | Exit) -> None:
        match event:
            case Exit():
                seat.log.is_whole = True
                self._exited(seat, event)
                return
            case PartWritten() if seat.uploads:
                seat.uploads.add(event)
                return
            case PhaseBegun():
                if event.phase is Phase.FIRST_STEP and seat.uploads and not seat.spec.rank:
                    seat.uploads.mark()
                seat.phase = event.phase
            case StepCommitted():
                if seat.phase == Phase.FIRST_STEP:  # the launch is over: there is time
                    self._make_ready_for_the_next(seat)
                seat.phase, seat.step = Phase.STEP, event.step
            case Halted() | Stopped():
                seat.phase = Phase.HALTED
        if isinstance(event, _STANDING):
            seat.said[event.kind] = event
        self._say(seat, event)

    def _say(self, seat: _Seat, line: Line) -> None:
        spec = seat.spec
        self._report(wire.Said(job=spec.job, generation=spec.generation, rank=spec.rank, line=line))

    def _exited(self, seat: _Seat, by: Exit) -> None:
        about: dict[str, Any] = {
            "job": seat.spec.job, "generation": seat.spec.generation, "rank": seat.spec.rank,
        }  # fmt: skip
        self._report(
            wire.Exited(**about, code=by.code, signal=by.signal, log_tail=tail(seat.log.path))
        )
        log.info("trainer ended", **about, by=str(by))

    def _make_ready_for_the_next(self, seat: _Seat) -> None:
        if seat.program:
            alike = [other for other in self._seats if other.program == seat.program]
            self._do(self._warm_up(seat.spec.job, seat.program, len(alike)))
        if seat.bundle:
            self._do(self._bundles.keep_few(self._needed_bundles))

    def _needed_bundles(self) -> set[str]:
        """Digests: what works or is set up here was unpacked from them, or an order names them."""
        ordered = (getattr(order, "bundle", None) for order in self._standing.open.values())
        seated = (seat.bundle for seat in self._seats)
        return {digest for digest in (*ordered, *seated) if digest} | self._setups.folders

    async def _warm_up(self, job: str, program: Program, count: int) -> None:
        try:
            await self._warm.prepare(job, program, count)
        except BrokenProgramError as error:  # though trainers could load it
            log.warning("no trainer stands by", because=str(error))

    def _end(self, seat: _Seat) -> None:
        seat.is_ending = True
        if seat.trainer:
            self._do(seat.trainer.kill())
        elif seat.phase in (_FETCH, Phase.SETUP):  # nothing lives yet that is this seat's alone
            if seat.setting_up:
                seat.setting_up.cancel()
            self._remove(seat)

    def _remove(self, seat: _Seat) -> None:
        """Nothing of it is left: what waited for that can go on."""
        if seat in self._seats:
            self._seats.remove(seat)
            if seat.trainer is None:
                self._do(self._finish_log(seat.log))
            self._removed.set()
            asyncio.get_running_loop().call_soon(self._go_on)

    async def _finish_log(self, of: Log) -> None:
        """There is no trainer; a setup that goes on for the next one may still write."""
        await self._setups.until_written(of.path)
        of.is_whole = True

    def _make_room_for_a_log(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        shipping = {shipped.path for shipped in self.logs}
        old = [path for path in self._folder.iterdir() if path not in shipping]
        for path in sorted(old, key=lambda p: p.stat().st_mtime)[:-_LOGS_KEPT]:
            path.unlink(missing_ok=True)


def _go_on_unless_ended(seat: _Seat) -> None:
    if seat.is_ending:
        raise LaunchError("it was ended before it began")


def _order_of(body: wire.PassedOn) -> progress.Order:
    """What the trainer is told."""
    match body:
        case wire.HaltOrder():
            return progress.Halt()
        case wire.DrainOrder():
            return progress.Stop()
        case wire.SaveNowOrder():
            return progress.SaveNow()
        case wire.SaveEveryOrder():
            return progress.SaveEvery(seconds=body.seconds)
        case wire.ForwardOrder():
            return progress.Forward(step=body.step, ballot=body.ballot)
        case wire.SaveLayers():
            return progress.Save(layers=body.layers)


async def _at(root: str, work: Callable[[], _T]) -> _T:
    """What ``work`` on a checkpoint folder gives; a store or a mount may stall for ever, and what
    others need threads for, and our end, must not wait for it.
    """
    return await in_thread(work, _STORE_SECONDS if is_url(root) else _FOLDER_SECONDS)
