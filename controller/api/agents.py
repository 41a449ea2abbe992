"""The agents' road, :mod:`agent.wire` over HTTP: takes in facts, hands out orders, decides nothing.

A parked order request is also a tripwire: when its client goes away unanswered, the node is suspect
within milliseconds and the reconciler looks at once.
"""

import asyncio
from contextlib import suppress
from typing import Annotated

import sqlalchemy as sa
import structlog
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from agent import wire
from controller.api.deps import Here, parts
from controller.api.errors import ProblemException, StrictRoute
from controller.bell import FEED, RECONCILER
from controller.parts import Parts
from controller.presence import NodeKey
from controller.store import adoption, nodes, reports

_LONGEST_WAIT = 60.0

log = structlog.get_logger()

router = APIRouter(prefix="/api/v1/agents", tags=["agents"], route_class=StrictRoute)
NodeName = Annotated[str, Path(pattern=wire.NODE_NAME)]


def _unknown(key: NodeKey) -> ProblemException:
    return ProblemException(
        409,
        f"{key[0]} is not known by incarnation {key[1]}: register again.",
        type_="unknown-incarnation",
    )


def _known(here: Parts, node: str, incarnation: str) -> NodeKey:
    key = (node, incarnation)
    if key not in here.presence:
        raise _unknown(key)
    return key


@router.post("/register")
async def register(here: Here, asked: wire.Register) -> wire.Registered:
    """An agent has come up."""
    if asked.wire_version != wire.WIRE_VERSION:
        theirs, ours = asked.wire_version, wire.WIRE_VERSION
        raise ProblemException(422, f"The agent speaks wire {theirs}, the controller {ours}.")
    at, key = here.clock.now(), (asked.node, asked.incarnation)
    reported = await asyncio.wrap_future(
        here.store.write(lambda connection: _register(connection, asked, at))
    )
    here.presence.admit(key, reported, at)
    here.bell.ring(RECONCILER, FEED, key)
    return wire.Registered(
        beat_seconds=here.settings.beat_seconds,
        max_offline_seconds=here.settings.max_offline,
        reported=reported,
    )


def _register(connection: sa.Connection, asked: wire.Register, at: float) -> int:
    reported = nodes.register(connection, asked, at)
    adoption.adopt(connection, asked, at)
    adoption.stop_what_is_void(connection, asked, at)
    adoption.release_what_is_over(connection, asked, at)
    return reported


@router.post("/{node}/beat")
async def beat(here: Here, node: NodeName, said: wire.Beat) -> wire.BeatAnswer:
    """I live. In memory only."""
    key = _known(here, node, said.incarnation)
    return wire.BeatAnswer(reported=here.presence.beat(key, said, here.clock.now()))


@router.get("/{node}/orders")
async def orders(
    request: Request,
    node: NodeName,
    incarnation: Annotated[str, Query(max_length=64)],
    here: Annotated[Parts, Depends(parts)],
    after: Annotated[int, Query(ge=0)] = 0,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 30.0,
) -> wire.Orders:
    """The standing orders above ``after``; parked until there is one, or ``wait`` seconds."""
    key = _known(here, node, incarnation)
    deadline = here.clock.now() + min(wait, _LONGEST_WAIT)
    here.presence.parked(key, here.clock.now())
    gone = asyncio.ensure_future(_client_gone(request))
    broken = False
    try:
        with here.bell.listen(key) as rung:
            while True:
                rung.clear()
                found = await asyncio.to_thread(_standing, here, key, after)
                if found or here.closing or key not in here.presence:
                    break
                if not await _wait(rung, gone, deadline - here.clock.now()):
                    break
        broken = gone.done() and not here.closing  # even with orders: nobody is there to take them
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        if here.presence.left(key, here.clock.now(), broken=broken):
            here.bell.ring(RECONCILER, FEED)
    if key not in here.presence:
        raise _unknown(key)
    return wire.Orders(orders=found)


def _standing(here: Parts, key: NodeKey, after: int) -> tuple[wire.Order, ...]:
    with here.store.read() as connection:
        return nodes.standing_orders(connection, *key, after)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _wait(rung: asyncio.Event, gone: asyncio.Future[None], seconds: float) -> bool:
    """True: somebody rang."""
    ringing = asyncio.ensure_future(rung.wait())
    try:
        await asyncio.wait(
            (ringing, gone), timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED
        )
        return ringing.done() and not gone.done()
    finally:
        ringing.cancel()


@router.post("/{node}/reports")
async def report(here: Here, node: NodeName, said: wire.Reports) -> wire.ReportsAnswer:
    """What has happened; durable before the answer."""
    key, at = _known(here, node, said.incarnation), here.clock.now()
    here.presence.heard(key, at)
    try:
        taken = await asyncio.wrap_future(
            here.store.write(lambda connection: reports.take(connection, *key, said.reports, at))
        )
    except nodes.UnknownIncarnationError:
        raise _unknown(key) from None
    here.presence.reported(key, taken.reported)
    if taken.dropped:
        here.dropped_reports += taken.dropped
        log.info("reports_dropped", node=node, reports=taken.dropped)
    here.bell.ring(FEED)
    if taken.decisive:
        here.bell.ring(RECONCILER)
    return wire.ReportsAnswer(reported=taken.reported)


@router.post("/{node}/logs", status_code=204)
async def logs(here: Here, node: NodeName, chunk: wire.LogChunk) -> Response:
    """Text of one trainer's log, from a node that holds its seat."""
    key = _known(here, node, chunk.incarnation)
    await asyncio.to_thread(_append, here, key, chunk)
    return Response(status_code=204)


def _append(here: Parts, key: NodeKey, chunk: wire.LogChunk) -> None:
    with here.store.read() as connection:
        seated = nodes.holds_seat(connection, *key, chunk.job, chunk.generation, chunk.rank)
    if seated:
        here.logs.append(chunk.job, chunk.generation, chunk.rank, chunk.offset, chunk.text)
