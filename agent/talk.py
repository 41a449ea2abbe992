"""The conversation of one incarnation with the controller.

    register -> beat every second
                one request for orders, always parked -> node
                node -> reports: at once, and again until they are durable
                logs, a piece at a time

Whatever fails is tried again at least once a second for ever. What runs does not depend on it, but
for one rule: after ``max_offline_seconds`` without an answer all that runs or stands by is stopped.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from agent import logs, machine, wire
from agent.client import AwayError, Client, ControllerError, RefusedError, UnknownError, pauses
from agent.node import Log, Node
from agent.reports import Outbox

_LOG_SECONDS = 0.5
_CHUNKS_A_ROUND = 8
_REFUSED_SECONDS = 1.0
_NO_ORDERS_SECONDS = 0.05
_ALL = 1_000_000

_T = TypeVar("_T")

log = structlog.get_logger()


class Talk:
    """Speaks for ``node`` from :meth:`begin` on."""

    def __init__(self, client: Client, hello: wire.Register) -> None:
        self._client = client
        self._hello = hello
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._all_told = asyncio.Event()
        self._all_told.set()
        self._after = 0
        """The newest order that was taken in; 0 after a break: all that stand are sent again."""
        self._registering = asyncio.Lock()
        self._registrations = 0
        self._heard_at = time.monotonic()
        self._is_away = False
        self._asking: asyncio.Future[tuple[wire.Order, ...]] | None = None

    def report(self, body: wire.ReportBody) -> None:
        """Tell the controller, now or as soon as it can be reached."""
        self._outbox.add(body)
        self._all_told.clear()
        self._news.set()

    async def all_told(self) -> None:
        """Wait until every report is durable."""
        await self._all_told.wait()

    async def begin(self) -> None:
        """Register for the first time. Raises RefusedError: there is no use in going on."""
        self._welcome = await self._client.patiently(lambda: self._client.register(self._hello))
        self._registrations = 1
        self._heard_at = time.monotonic()

    async def go_on(self, node: Node) -> None:
        """Speak for ``node`` until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(node))
            group.create_task(self._take_orders(node))
            group.create_task(self._report(node))
            group.create_task(self._ship_logs(node))
            group.create_task(self._bear_being_cut_off(node))

    async def _beat(self, node: Node) -> None:
        while True:
            await self._ask(node, lambda: self._client.beat(self._state(node)))
            await asyncio.sleep(self._welcome.beat_seconds)

    def _state(self, node: Node) -> wire.Beat:
        return machine.beat(self._hello.incarnation, node.running())

    async def _take_orders(self, node: Node) -> None:
        while True:
            orders = await self._ask(node, self._parked)
            if orders:
                self._after = max(order.number for order in orders)
                node.take(orders)
            else:
                await asyncio.sleep(_NO_ORDERS_SECONDS)  # a controller that ends answers at once

    async def _parked(self) -> tuple[wire.Order, ...]:
        """The next orders. Given up when other calls fail: after a cut its connection is dead, and
        nobody would say so before its time is over.
        """
        asking = asyncio.ensure_future(self._client.orders(self._hello.incarnation, self._after))
        self._asking = asking
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise AwayError("given up, as other calls failed")
            return asking.result()
        finally:
            asking.cancel()

    async def _report(self, node: Node) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            most = _ALL
            while batch := self._outbox.next_batch(most):
                told = wire.Reports(incarnation=self._hello.incarnation, reports=batch)
                try:
                    answer = await self._ask(
                        node, partial(self._client.report, told), may_be_refused=True
                    )
                except RefusedError as error:
                    most = self._narrow(batch, error)
                    continue
                most = _ALL
                self._outbox.acknowledge(answer.reported)
                if answer.reported < batch[0].number:  # nothing of it was taken: do not insist
                    await asyncio.sleep(_REFUSED_SECONDS)
            self._all_told.set()

    def _narrow(self, batch: Sequence[wire.Report], error: RefusedError) -> int:
        """One of ``batch`` is refused for what it says, and always will be: find it, say so in its
        place, and go on with the rest. How many to send next.
        """
        if len(batch) > 1:
            return len(batch) // 2
        log.error("report refused, set aside", kind=batch[0].body.kind, because=str(error))
        self._outbox.set_aside(str(error))
        return 1

    async def _ship_logs(self, node: Node) -> None:
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            for written in node.logs:
                logs.cap(written.path)
            try:
                for shipped in tuple(node.logs):
                    await self._ship(shipped, node)
            except ControllerError:
                continue  # the beats see to it; nothing was marked as shipped

    async def _ship(self, of: Log, node: Node) -> None:
        """A round for one log; off the list when all of it is shipped or nobody wants it."""
        for _ in range(_CHUNKS_A_ROUND):
            is_whole = of.is_whole
            chunk = logs.next_chunk(of.path, of.shipped, is_whole=is_whole)
            if chunk is None:
                if is_whole:
                    node.logs.remove(of)
                return
            try:
                await self._client.log(
                    wire.LogChunk(
                        incarnation=self._hello.incarnation,
                        job=of.job,
                        generation=of.generation,
                        rank=of.rank,
                        offset=chunk.offset,
                        text=chunk.text,
                    )
                )
            except RefusedError as error:
                log.warning("log not wanted", job=of.job, rank=of.rank, because=str(error))
                node.logs.remove(of)
                return
            of.shipped = chunk.end

    async def _bear_being_cut_off(self, node: Node) -> None:
        """Who stands still is told to stay, as long as nobody can order anything; at last all are
        stopped.
        """
        while True:
            await asyncio.sleep(1.0)
            if self._is_away:
                node.stay()
            silence = time.monotonic() - self._heard_at
            at_work = node.running() or node.warm_for
            if silence > self._welcome.max_offline_seconds and at_work:
                log.error("cut off for too long, stopping what runs", seconds=round(silence))
                await node.kill_all()

    async def _ask(
        self, node: Node, call: Callable[[], Awaitable[_T]], *, may_be_refused: bool = False
    ) -> _T:
        """The answer of ``call``, however long the controller is away or does not know us.

        Raises RefusedError when what the call says is refused and that ``may_be``.
        """
        for pause in pauses():
            registration = self._registrations
            try:
                answer = await call()
            except UnknownError:
                await self._register_again(node, registration)
            except AwayError as error:
                self._after = 0
                self._note(error)
            except RefusedError as error:
                if may_be_refused and error.is_of_the_body:
                    raise
                log.error("refused by the controller", because=str(error))
                await asyncio.sleep(_REFUSED_SECONDS)
            else:
                self._heard_at = time.monotonic()
                self._note(None)
                return answer
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    def _note(self, error: AwayError | None) -> None:
        """Log once when the controller goes, once when it is back; twice in a row is a break."""
        if error and self._is_away and self._asking:
            self._asking.cancel()
        if error and not self._is_away:
            log.warning("controller away, training goes on", because=str(error))
        elif not error and self._is_away:
            log.info("controller back")
        self._is_away = error is not None

    async def _register_again(self, node: Node, registration: int) -> None:
        """Say what runs here; once, however many calls found that we are not known."""
        async with self._registering:
            if self._registrations != registration:
                return
            now = {"running": node.running(whole=True), "warm_for": node.warm_for}
            hello = self._hello.model_copy(update=now)
            try:
                self._welcome = await self._client.register(hello)
            except ControllerError as error:
                log.warning("cannot register again", because=str(error))
                return
            log.info("registered again", running=len(hello.running))
            self._registrations += 1
            self._after = 0
            durable = self._welcome.reported
            if durable is not None and self._outbox.resume(durable):
                node.forget_orders()
