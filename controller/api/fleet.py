"""Nodes, and the events of everything."""

from typing import Annotated

from fastapi import APIRouter, Query

from controller.api import schemas, views
from controller.api.auth import Caller
from controller.api.deps import Here
from controller.api.errors import ProblemException, StrictRoute
from controller.api.jobs import Limit, event_page
from controller.bell import FEED, RECONCILER
from controller.core.events import EventType
from controller.parts import Parts
from controller.store import conduct, nodes

router = APIRouter(prefix="/api/v1", tags=["nodes"], route_class=StrictRoute)


@router.get("/nodes")
def list_nodes(here: Here, all: bool = False) -> schemas.Page[schemas.NodeView]:
    """The live ones; with ``all`` every incarnation there ever was."""
    with here.store.read() as connection:
        now = here.clock.now()
        items = views.node_views(connection, here.presence, now, gone_too=all)
    return schemas.Page(items=items)


@router.post("/nodes/{node}/actions/drain", status_code=202)
def drain(here: Here, by: Caller, node: str) -> schemas.NodeView:
    """What works there stops after a saved step and goes on elsewhere; nothing new begins there."""
    return _drain(here, by, node, wanted=True)


@router.post("/nodes/{node}/actions/undrain", status_code=202)
def undrain(here: Here, by: Caller, node: str) -> schemas.NodeView:
    """The node may be used again."""
    return _drain(here, by, node, wanted=False)


@router.post("/nodes/{node}/actions/release", status_code=202)
def release(here: Here, by: Caller, node: str) -> schemas.NodeView:
    """A node that was set aside may be used again at once, with a clean record."""
    at = here.clock.now()
    if not here.store.write(lambda c: conduct.release(c, node, by.label, at)).result():
        raise ProblemException(409, f"{node} is not set aside.")
    return _seen(here, node, at)


def _drain(here: Parts, by: Caller, node: str, *, wanted: bool) -> schemas.NodeView:
    at = here.clock.now()
    key = here.store.write(lambda c: nodes.drain(c, node, by.label, at, wanted=wanted)).result()
    if key is None:
        raise ProblemException(404, f"There is no live node {node}.")
    return _seen(here, node, at)


def _seen(here: Parts, node: str, at: float) -> schemas.NodeView:
    """The node, live or gone, after something was done about it."""
    here.ring(RECONCILER, FEED)
    with here.store.read() as connection:
        found = views.node_views(connection, here.presence, at, gone_too=True)
    return next(view for view in reversed(found) if view.name == node)


@router.get("/events")
def list_events(
    here: Here,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Limit = 50,
    type: EventType | None = None,
    last: Annotated[int | None, Query(ge=1, le=1000)] = None,
) -> schemas.Page[schemas.EventView]:
    """What has happened."""
    with here.store.read() as connection:
        return event_page(connection, None, after, limit, type, last)
