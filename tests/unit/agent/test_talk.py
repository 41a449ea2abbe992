"""The conversation when its lines break."""

import asyncio
import itertools
from typing import Any, cast

import httpx2

from agent import wire
from agent.client import Client
from agent.node import Node
from agent.talk import Talk
from tests.fakes.zygotes import run_spec

FACTS = wire.Facts(
    hostname="h", boot_id="b", pid=1, devices=(wire.Device(kind="cpu", index=0, memory_bytes=1),),
    cores=1, memory_bytes=1, data_host="127.0.0.1", store_port=1, agent_version="0",
)  # fmt: skip
HELLO = wire.Register(node="vm-1", incarnation="incarnation", facts=FACTS)
START = wire.Order(number=1, body=wire.Start(spec=run_spec()))


class IdleNode:
    """Runs nothing and remembers what it is ordered."""

    def __init__(self) -> None:
        self.logs: list[object] = []
        self.taken = asyncio.Event()

    def running(self, *, whole: bool = False) -> tuple[wire.RunningTrainer, ...]:
        return ()

    def take(self, orders: tuple[wire.Order, ...]) -> None:
        assert orders == (START,)
        self.taken.set()


def test_a_parked_request_whose_connection_is_dead_is_asked_anew_when_the_controller_is_back() -> (
    None
):
    """The first one hangs for ever, as after a cut; beats fail, then they are answered again."""
    asked_after: list[str] = []
    failures = iter([True, True])

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/register"):
            welcome = {"beat_seconds": 0.01, "max_offline_seconds": 60}
            return httpx2.Response(200, json=welcome)
        if request.url.path.endswith("/beat"):
            if asked_after and any(itertools.islice(failures, 1)):
                raise httpx2.ConnectTimeout("no route")
            return httpx2.Response(200, json={"reported": 0})
        asked_after.append(request.url.params["after"])
        if len(asked_after) == 1:
            await asyncio.Event().wait()
        return httpx2.Response(200, text=wire.Orders(orders=(START,)).model_dump_json())

    async def story() -> None:
        client = Client("http://c", "t", "vm-1", transport=httpx2.MockTransport(answer))
        talk, node = Talk(client, HELLO), IdleNode()
        await talk.begin()
        talking = asyncio.create_task(talk.go_on(cast(Node, cast(Any, node))))
        async with asyncio.timeout(10):
            await node.taken.wait()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await client.close()

    asyncio.run(story())
    assert asked_after[:2] == ["0", "0"]


def test_a_refused_report_is_set_aside_and_the_rest_goes_on() -> None:
    """One of seven is not understood; refused with its batch, it is found by halving."""
    durable: list[wire.ReportBody] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/register"):
            welcome = {"beat_seconds": 0.01, "max_offline_seconds": 60}
            return httpx2.Response(200, json=welcome)
        if request.url.path.endswith("/beat"):
            return httpx2.Response(200, json={"reported": 0})
        if request.url.path.endswith("/orders"):
            await asyncio.Event().wait()
        told = wire.Reports.model_validate_json(request.content)
        if any(getattr(report.body, "number", None) == 5 for report in told.reports):
            return httpx2.Response(422, json={"title": "Not valid", "detail": "what is that?"})
        durable.extend(report.body for report in told.reports)
        return httpx2.Response(200, json={"reported": told.reports[-1].number})

    async def story() -> None:
        client = Client("http://c", "t", "vm-1", transport=httpx2.MockTransport(answer))
        talk, node = Talk(client, HELLO), IdleNode()
        await talk.begin()
        for number in range(1, 8):
            talk.report(wire.OrderDone(number=number))
        talking = asyncio.create_task(talk.go_on(cast(Node, cast(Any, node))))
        async with asyncio.timeout(10):
            await talk.all_told()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await client.close()

    asyncio.run(story())
    fifth = wire.SetAside(refused="order_done", because="422: what is that?")
    orders = [wire.OrderDone(number=number) for number in range(1, 8)]
    assert durable == [*orders[:4], fifth, *orders[5:]]
