"""Nodes, and the events of everything."""

from typing import Annotated

from fastapi import APIRouter, Query

from controller.api import schemas, views
from controller.api.deps import Here
from controller.api.jobs import Limit, event_page
from controller.core.events import EventType

router = APIRouter(prefix="/api/v1", tags=["nodes"])


@router.get("/nodes")
def list_nodes(here: Here, all: bool = False) -> schemas.Page[schemas.NodeView]:
    """The live ones; with ``all`` every incarnation there ever was."""
    with here.store.read() as connection:
        now = here.clock.now()
        items = views.node_views(connection, here.presence, now, gone_too=all)
    return schemas.Page(items=items)


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
