"""The one live stream: what has happened, as it becomes durable, for pages and `-f`.

Each round reads what is new and sends it; between rounds it waits for a ring, a second at most. A
reader that comes back says ``?after=`` the last seq it saw; one that is too far behind, or comes
from another epoch's future, is told to ``reset``.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from controller.api import schemas, views
from controller.api.deps import Here, job_row
from controller.bell import FEED
from controller.clock import moment
from controller.core.events import EventType
from controller.parts import Parts
from controller.store.tables import jobs

router = APIRouter(prefix="/api/v1", tags=["stream"])
_AT_MOST = 1000
"""Events to catch up; more are not sent but fetched."""
_REST_SECONDS = 0.1
_TICK_SECONDS = 1.0
_OF_NODES = frozenset({EventType.NODE_JOINED, EventType.NODE_LOST, EventType.NODE_EVICTED})


@dataclass
class _Reader:
    """What one stream has sent so far."""

    here: Parts
    seq: int
    newest: int
    job: str | None
    behind: bool
    _ticked: dict[str, tuple[int, float]] = field(default_factory=dict)
    _shown: Sequence[schemas.NodeView] = ()

    @property
    def hello(self) -> ServerSentEvent:
        now = moment(self.here.clock.now())
        hello = schemas.Hello(epoch=self.here.epoch, seq=self.newest, now=now)
        return _message("hello", hello, self.seq)

    def news(self) -> list[ServerSentEvent]:
        """What has come since the last call. Runs in a thread."""
        with self.here.store.read() as connection:
            happened = views.event_views(connection, job=None, after=self.seq, limit=_AT_MOST)
            self.seq = happened[-1].seq if happened else self.seq
            mine = [e for e in happened if self.job is None or e.job in (None, self.job)]
            touched = {e.job for e in mine if e.job}
            if any(e.type in _OF_NODES for e in mine):
                touched |= {self.job} if self.job else set()
            return [
                *(_message("event", event, event.seq) for event in mine),
                *self._jobs(connection, touched),
                *self._ticks(connection),
                *self._nodes(connection),
            ]

    def _jobs(self, connection: sa.Connection, touched: set[str]) -> Iterator[ServerSentEvent]:
        rows = connection.execute(sa.select(jobs).where(jobs.c.id.in_(touched))).all()
        for view in views.job_views(connection, rows):
            yield _message("job", view)

    def _ticks(self, connection: sa.Connection) -> Iterator[ServerSentEvent]:
        """Of running jobs whose step has moved, at most one a second each."""
        now = self.here.clock.now()
        for tick in views.ticks(connection, now, self.job):
            step, at = self._ticked.get(tick.job, (-1, 0.0))
            if tick.step != step and now - at >= _TICK_SECONDS * 0.9:
                self._ticked[tick.job] = tick.step, now
                yield _message("tick", tick)

    def _nodes(self, connection: sa.Connection) -> Iterator[ServerSentEvent]:
        """All live ones, when anything but the time has changed."""
        found = views.node_views(connection, self.here.presence, self.here.clock.now())
        if [_steady(n) for n in found] != [_steady(n) for n in self._shown]:
            self._shown = found
            yield _message("nodes", schemas.Page[schemas.NodeView](items=found))


def _begin(
    here: Here, after: Annotated[int | None, Query(ge=0)] = None, job: str | None = None
) -> _Reader:
    """Before the answer begins: an unknown job is still a 404."""
    with here.store.read() as connection:
        newest = views.newest_seq(connection)
        wanted = job_row(connection, job).id if job is not None else None
    behind = after is not None and not newest - _AT_MOST <= after <= newest
    start = newest if after is None or behind else after
    return _Reader(here, start, newest, wanted, behind)


@router.get("/stream", response_class=EventSourceResponse)
async def stream(
    here: Here, reader: Annotated[_Reader, Depends(_begin)]
) -> AsyncIterator[ServerSentEvent]:
    """hello, then event, job, tick, nodes; of one ``job`` or of all."""
    yield reader.hello
    if reader.behind:
        yield ServerSentEvent(event="reset", data={})
    with here.bell.listen(FEED) as rung:
        while not here.closing:
            rung.clear()
            for message in await asyncio.to_thread(reader.news):
                yield message
            with suppress(TimeoutError):
                await asyncio.wait_for(rung.wait(), _TICK_SECONDS)
            if not here.closing:
                await asyncio.sleep(_REST_SECONDS)


def _steady(node: schemas.NodeView) -> tuple[object, ...]:
    said = (
        node.state,
        node.suspect,
        node.job,
        node.ranks,
        node.quarantine,
        node.slow,
        node.leaves_at,
    )
    return node.name, node.incarnation, *said


def _message(kind: str, view: BaseModel, seq: int | None = None) -> ServerSentEvent:
    number = None if seq is None else str(seq)
    return ServerSentEvent(event=kind, raw_data=view.model_dump_json(), id=number)
