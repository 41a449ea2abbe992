"""Getting ready for a seat that may come, on a machine on which nothing runs: the bundle is
fetched, `setup` run, the program loaded (:mod:`agent.warm`). For one job at a time; whatever else
is ordered comes first.
"""

import asyncio
from pathlib import Path

import structlog

from agent import logs, wire
from agent.bundles import BundleError, Bundles, placed_program
from agent.client import ControllerError
from agent.launcher import LaunchError
from agent.setup import SetupError, Setups
from agent.warm import Warm
from trainer.contract.spec import Program

_CAP_SECONDS = 1.0

log = structlog.get_logger()


class Spare:
    """Makes a machine ready for a job."""

    def __init__(self, bundles: Bundles, setups: Setups, warm: Warm, log_path: Path) -> None:
        """What `setup` prints goes to ``log_path``."""
        self._bundles = bundles
        self._setups = setups
        self._warm = warm
        self._log_path = log_path
        self._job: str | None = None
        self._getting_ready: asyncio.Task[str | None] | None = None

    @property
    def job(self) -> str | None:
        """For which this machine is made ready, or is."""
        return self._job if self._getting_ready else self._warm.job

    async def prepare(self, order: wire.Prepare) -> str | None:
        """Get ready; why that cannot be. None also when something else came between."""
        self._leave_off()
        self._job = order.job
        self._getting_ready = task = asyncio.create_task(self._get_ready(order))
        try:
            while (await asyncio.wait([task], timeout=_CAP_SECONDS))[1]:
                logs.cap(self._log_path)
        finally:
            task.cancel()
            if self._getting_ready is task:
                self._getting_ready = None
        return None if task.cancelled() else task.result()

    async def let_go(self) -> None:
        """Leave off; end what stands by."""
        self._leave_off()
        await self._warm.let_go()

    def _leave_off(self) -> None:
        if self._getting_ready:
            self._getting_ready.cancel()

    async def _get_ready(self, order: wire.Prepare) -> str | None:
        try:
            if self._warm.job != order.job:
                await self._warm.let_go()
            await self._warm.prepare(order.job, await self._program_of(order), order.trainers)
        except (SetupError, BundleError, ControllerError, LaunchError, OSError) as error:
            log.warning("cannot get ready for a seat", job=order.job, because=str(error))
            return str(error)
        log.info("ready for a seat", job=order.job)
        return None

    async def _program_of(self, order: wire.Prepare) -> Program:
        """As it lies on this machine, set up."""
        if order.bundle is None:
            return order.program
        unpacked = await self._bundles.folder_of(order.bundle)
        if order.setup:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            await self._setups.wait_for(order.setup, unpacked, self._log_path)
        return placed_program(order.program, unpacked)
