"""The door: who asks, and may they? Asked of every request before anything of it is read.

A closed table says who may go where; what is not in it needs a user. An agent's token opens only
what agents need, a user's never an agent's road. A browser shows a session cookie instead of a
token (an EventSource cannot send one); with a cookie, whatever changes something must come from
our own pages.
"""

import secrets
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.api.errors import ProblemException, problem
from controller.parts import Parts
from controller.settings import Settings
from controller.store.tokens import Role, Token

COOKIE = "varuna_session"
SESSION_SECONDS = 12 * 3600.0
_TRIES_A_MINUTE = 5
_REPORTS_CAP_BYTES = 16 << 20
_SAFE = ("GET", "HEAD", "OPTIONS")

OPEN = ("/healthz", "/login", "/static")
"""No token needed: nothing is told there."""


def roles_for(method: str, path: str) -> tuple[Role, ...]:
    """Which roles open it (any one of them); empty: everybody's."""
    if any(_below(path, door) for door in OPEN):
        return ()
    if _below(path, "/api/v1/agents"):
        return (Role.AGENT,)
    if _below(path, "/api/v1/bundles") and method in _SAFE:
        return (Role.AGENT, Role.USER)
    return (Role.VIEWER,) if method in _SAFE else (Role.USER,)


def _below(path: str, door: str) -> bool:
    return path == door or path.startswith(door + "/")


class Door:
    """ASGI middleware. Leaves ``request_id`` and ``caller`` (a Token) in the scope; lets no larger
    body in than the road is meant for.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        parts: Parts = scope["app"].state.parts
        cap = _body_cap(scope["path"], parts.settings)
        refusal = _refuse(scope, parts) or _refuse_size(scope, cap)
        await (refusal or self._app)(scope, _capped(receive, cap), send_with_id)


def _refuse(scope: Scope, parts: Parts) -> Response | None:
    method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
    wanted = roles_for(method, path)
    given, by_cookie = _credential(headers)
    token = parts.tokens.check(given, parts.clock.now()) if given else None
    scope["caller"] = token
    if not wanted:
        return None
    if token is None:
        if method in _SAFE and "text/html" in headers.get("accept", "") and _is_page(path):
            return RedirectResponse(f"/login?next={quote(path)}", status_code=303)
        what = "This token is not known or has expired." if given else "A token is needed."
        return problem(path, scope["request_id"], 401, what, headers={"WWW-Authenticate": "Bearer"})
    if not any(token.role.may(role) for role in wanted):
        needed = " or ".join(wanted)
        what = f"A token of role {token.role} may not do this; it takes {needed}."
        return problem(path, scope["request_id"], 403, what)
    if by_cookie and method not in _SAFE and not _same_origin(headers):
        what = "With a session cookie this must come from the dashboard's own pages."
        return problem(path, scope["request_id"], 403, what)
    return None


def _body_cap(path: str, settings: Settings) -> int:
    if _below(path, "/api/v1/agents"):
        return _REPORTS_CAP_BYTES
    return settings.bundle_cap_bytes if _below(path, "/api/v1/bundles") else settings.body_cap_bytes


def _refuse_size(scope: Scope, cap: int) -> Response | None:
    said = Headers(scope=scope).get("content-length", "0")
    if said.isdigit() and int(said) <= cap:
        return None
    return problem(scope["path"], scope["request_id"], 413, _too_large(cap))


def _too_large(cap: int) -> str:
    return f"The body may have at most {cap:,} bytes."


def _capped(receive: Receive, cap: int) -> Receive:
    """For bodies that do not say their length."""
    size = 0

    async def receive_counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > cap:
            raise HTTPException(413, _too_large(cap))
        return message

    return receive_counted


def _credential(headers: Headers) -> tuple[str | None, bool]:
    """The token given, and whether it came as a cookie."""
    if authorization := headers.get("authorization"):
        scheme, _, token = authorization.partition(" ")
        return (token.strip() if scheme.lower() == "bearer" else None), False
    for cookie in headers.get("cookie", "").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == COOKIE:
            return value, True
    return None, False


def _is_page(path: str) -> bool:
    return not path.startswith("/api/") and path != "/openapi.json"


def _same_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == headers.get("host")


# ---- for routes and pages


def caller(request: Request) -> Token:
    """Who asks."""
    token: Token | None = request.scope.get("caller")
    assert token is not None, "the door lets nobody in without a token"
    return token


Caller = Annotated[Token, Depends(caller)]


# ---- sessions of the dashboard


class Logins:
    """Turns a token into a session; a few tries a minute, over all callers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._failures: list[float] = []

    def sign_in(self, token: str) -> str | None:
        """The value of a new session cookie; None: that is no token of a person.

        Blocks until the session is durable. Raises a 429 problem after too many failures.
        """
        now = self._parts.clock.now()
        self._failures = [at for at in self._failures if at > now - 60]
        if len(self._failures) >= _TRIES_A_MINUTE:
            raise ProblemException(429, "Too many wrong tokens. Wait a minute.")
        known = self._parts.tokens.check(token.strip(), now)
        if known is None or known.role is Role.AGENT:
            self._failures.append(now)
            return None
        label = f"session of {known.label}"[:64]
        return self._parts.tokens.create(known.role, label, now, SESSION_SECONDS)

    def sign_out(self, request: Request) -> None:
        """Forget the session that the request shows."""
        given, by_cookie = _credential(request.headers)
        if given and by_cookie:
            self._parts.tokens.revoke(given)


def set_cookie(response: Response, value: str, *, secure: bool) -> None:
    """Hand the session to the browser."""
    response.set_cookie(
        COOKIE, value, max_age=int(SESSION_SECONDS), httponly=True, samesite="strict", secure=secure
    )


def clear_cookie(response: Response) -> None:
    """Take it back."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
