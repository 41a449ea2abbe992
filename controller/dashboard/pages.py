"""The dashboard's pages. They read what the API reads (:mod:`controller.api.views`) and decide
nothing.

A page is drawn whole on the server; its panels are fetched again, one by one, when the event stream
says that something has changed (static/live.js). What goes wrong in a panel stays in that panel.
Everything is escaped, and the CSP allows our own files only.
"""

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jinja2
import sqlalchemy as sa
import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse

from controller import words
from controller.api import past, views
from controller.api.auth import Logins, clear_cookie, set_cookie
from controller.api.deps import Here, job_row
from controller.api.errors import ProblemException
from controller.api.jobs import job_logs
from controller.clock import moment
from controller.core.states import JobState
from controller.dashboard.bars import PHASES, segments
from controller.parts import Parts
from controller.store import jobs as stored_jobs
from controller.store import ledger

log = structlog.get_logger()

HERE = Path(__file__).parent
CSP = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
EVENTS_SHOWN = 40
JOBS_SHOWN = 200
LOG_LINES = 500
_LOGIN_BYTES = 4096

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals.update(words=words, segments=segments, phases=PHASES)


class HtmlRoute(APIRoute):
    """A route whose errors are pages too; of a panel, what its place on the page shows instead."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def in_html(request: Request) -> Response:
            try:
                return await handle(request)
            except ProblemException as problem:
                return _problem(request, problem.status, problem.detail)
            except RequestValidationError:
                return _problem(request, 422, "The address of this page is not valid.")
            except Exception as error:  # the outermost ring of one page or panel
                log.error("page_failed", path=request.url.path, error=repr(error))
                return _problem(request, 500, "The controller's log says more, by the request id.")

        return in_html


router = APIRouter(route_class=HtmlRoute, include_in_schema=False)


def install(app: FastAPI) -> None:
    """Give ``app`` the pages and their files."""
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")


# ---- pages


@router.get("/")
def jobs_page(request: Request, parts: Here, all: bool = False) -> Response:
    """All jobs."""
    with parts.store.read() as connection:
        return _page(request, "jobs.html", page="jobs", **_jobs(connection, parts, all))


@router.get("/nodes")
def nodes_page(request: Request, parts: Here) -> Response:
    """All live nodes."""
    with parts.store.read() as connection:
        return _page(request, "nodes.html", page="nodes", **_nodes(connection, request, parts))


@router.get("/jobs/{job}")
def job_page(request: Request, parts: Here, job: str) -> Response:
    """One job; a name leads to the newest job of that name."""
    with parts.store.read() as connection:
        row = job_row(connection, job)
        if row.id != job:
            return RedirectResponse(f"/jobs/{row.id}", status_code=303)
        context = _frame(connection, parts)
        for panel in PANELS.values():
            context |= panel(connection, parts, row)
        return _page(request, "job.html", page="jobs", **context)


@router.get("/jobs/{job}/logs")
def logs_page(
    request: Request, parts: Here, job: str, rank: int | None = None, generation: int | None = None
) -> Response:
    """The log of one trainer."""
    return _page(request, "logs.html", page="jobs", **_log(parts, job, rank, generation))


# ---- panels


@router.get("/panels/jobs")
def jobs_panel(request: Request, parts: Here, all: bool = False) -> Response:
    """The rows of `/`."""
    with parts.store.read() as connection:
        return _page(request, "panels/jobs.html", **_jobs(connection, parts, all))


@router.get("/panels/nodes")
def nodes_panel(request: Request, parts: Here) -> Response:
    """The rows of `/nodes`."""
    with parts.store.read() as connection:
        return _page(request, "panels/nodes.html", **_nodes(connection, request, parts))


@router.get("/jobs/{job}/panels/logs")
def log_panel(request: Request, parts: Here, job: str, rank: int, generation: int) -> Response:
    """The text of a log."""
    return _page(request, "panels/logs.html", **_log(parts, job, rank, generation))


@router.get("/jobs/{job}/panels/{name}")
def job_panel(request: Request, parts: Here, job: str, name: str) -> Response:
    """One panel of a job's page."""
    if name not in PANELS:
        raise ProblemException(404, f"There is no panel {name}.")
    with parts.store.read() as connection:
        context = PANELS[name](connection, parts, job_row(connection, job))
        return _page(request, f"panels/{name}.html", **context)


Context = dict[str, Any]
Panel = Callable[[sa.Connection, Parts, Any], Context]


def _frame(connection: sa.Connection, parts: Parts) -> Context:
    """What every live page needs: where the stream goes on, and the time."""
    return {"seq": views.newest_seq(connection), "now": moment(parts.clock.now())}


def _head(connection: sa.Connection, parts: Parts, row: Any) -> Context:
    return {"job": views.job_view(connection, row), "now": moment(parts.clock.now())}


def _grid(connection: sa.Connection, parts: Parts, row: Any) -> Context:
    """The newest generation that was given seats, while the job is not over."""
    job = views.job_view(connection, row)
    generation = None if job.state.is_over else past.last_seated(connection, row.id)
    live = views.node_views(connection, parts.presence, parts.clock.now())
    return {
        "job": job,
        "generation": generation,
        "cells": words.grid(generation) if generation else (),
        "spares": [node for node in live if not node.ranks],
    }


def _recoveries(connection: sa.Connection, parts: Parts, row: Any) -> Context:
    found = past.recovery_views(connection, row.id)
    return _head(connection, parts, row) | {
        "recoveries": found,
        "longest": max((view.gap_s or 0.0 for view in found), default=0.0),
        "replay": words.replay(past.replay_view(ledger.replay_of(connection, row.id))),
    }


def _events(connection: sa.Connection, parts: Parts, row: Any) -> Context:
    found = views.event_views(
        connection, job=row.id, limit=EVENTS_SHOWN, newest=True, routine=False
    )
    more = len(found) == EVENTS_SHOWN
    return _head(connection, parts, row) | {"events": found, "more": more}


PANELS: Mapping[str, Panel] = {
    "head": _head,
    "grid": _grid,
    "recoveries": _recoveries,
    "events": _events,
}


def _jobs(connection: sa.Connection, parts: Parts, all_: bool) -> Context:
    states = () if all_ else tuple(state for state in JobState if not state.is_over)
    rows = stored_jobs.listed(connection, states=states, before=None, limit=JOBS_SHOWN)
    return _frame(connection, parts) | {"jobs": views.job_views(connection, rows), "all": all_}


def _nodes(connection: sa.Connection, request: Request, parts: Parts) -> Context:
    found = views.node_views(connection, parts.presence, parts.clock.now())
    url = str(request.base_url).rstrip("/")
    return _frame(connection, parts) | {"nodes": found, "url": url}


def _log(parts: Parts, job: str, rank: int | None, generation: int | None) -> Context:
    view = job_logs(parts, job, rank, generation, LOG_LINES)
    with parts.store.read() as connection:
        return {"job": views.job_view(connection, job_row(connection, job)), "log": view}


# ---- signing in and out


@router.get("/login")
def login_page(request: Request, next: str = "/") -> Response:
    """Ask for a token."""
    return _page(request, "login.html", next=_local(next), problem=None)


@router.post("/login")
async def login(request: Request, parts: Here) -> Response:
    """A token for a session cookie."""
    form = await _form(request)
    logins: Logins = request.app.state.logins
    try:
        session = await run_in_threadpool(logins.sign_in, form.get("token", ""))
        status, problem = 401, "This token is not known, or it is an agent's."
    except ProblemException as refused:
        session, status, problem = None, refused.status, refused.detail
    if session is None:
        context = {"next": _local(form.get("next", "/")), "problem": problem}
        return _page(request, "login.html", status=status, **context)
    answer = RedirectResponse(_local(form.get("next", "/")), status_code=303)
    set_cookie(answer, session, secure=request.url.scheme == "https")
    return answer


@router.post("/login/out")
def logout(request: Request) -> Response:
    """Forget the session."""
    logins: Logins = request.app.state.logins
    logins.sign_out(request)
    answer = RedirectResponse("/login", status_code=303)
    clear_cookie(answer)
    return answer


async def _form(request: Request) -> dict[str, str]:
    """The first value of each field of a small form."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LOGIN_BYTES:
            raise ProblemException(413, "This is no login form.")
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def _local(path: str) -> str:
    """``path`` if it is one of ours: nobody is led elsewhere after signing in."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"


# ---- drawing


def _page(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    signed_in = request.scope.get("caller") is not None
    given = {"page": "", "signed_in": signed_in, **context}
    return HTMLResponse(
        _templates.get_template(template).render(given),
        status_code=status,
        headers={
            "Content-Security-Policy": CSP,
            "Cache-Control": "no-store",
            "Referrer-Policy": "same-origin",
        },
    )


def _problem(request: Request, status: int, detail: str) -> HTMLResponse:
    is_panel = "/panels/" in request.url.path
    return _page(
        request,
        "panels/problem.html" if is_panel else "problem.html",
        status=status,
        title="Not found" if status == 404 else "This did not work",
        detail=detail,
        request_id=request.scope.get("request_id"),
    )
