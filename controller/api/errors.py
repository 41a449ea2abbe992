"""Every error is an RFC 9457 problem: routing, validation and our own mistakes included."""

import json
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from controller.api.schemas import Problem, ProblemError
from controller.specfile import BadSpecError

log = structlog.get_logger()

_TITLES = {
    400: "Bad request", 401: "Not signed in", 403: "Not allowed", 404: "Not found",
    405: "Method not allowed", 409: "Conflict", 413: "Too large", 422: "Not valid",
    500: "Our own mistake", 503: "Not ready",
}  # fmt: skip


class ProblemException(Exception):  # noqa: N818 - it carries a problem, which need not be an error
    """Answer with this problem."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        type_: str = "about:blank",
        errors: Sequence[ProblemError] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.type = status, detail, type_
        self.errors = tuple(errors)


def not_found(what: str) -> ProblemException:
    """404."""
    return ProblemException(404, f"There is no {what}.")


def problem(
    path: str,
    request_id: str,
    status: int,
    detail: str,
    *,
    type_: str = "about:blank",
    errors: Sequence[ProblemError] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """The response that carries a problem."""
    body = Problem(
        type=type_,
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        instance=path,
        request_id=request_id,
        errors=tuple(errors),
    )
    return Response(
        body.model_dump_json(exclude_none=True),
        status_code=status,
        media_type="application/problem+json",
        headers={"X-Request-Id": request_id, **(headers or {})},
    )


def refuse_spec(bad: BadSpecError, below: str = "") -> ProblemException:
    """422 with every mistake of a spec; ``below`` is where the spec stands in the body."""
    return ProblemException(
        422,
        str(bad),
        errors=[
            ProblemError(
                pointer=below + error.pointer,
                detail=error.message,
                line=error.line,
                suggestion=error.suggestion,
            )
            for error in bad.errors
        ],
    )


def install(app: FastAPI) -> None:
    """Make ``app`` answer problems only."""

    def answer(request: Request, status: int, detail: str, **more: Any) -> Response:
        request_id = request.scope.get("request_id", "")
        return problem(request.url.path, request_id, status, detail, **more)

    @app.exception_handler(ProblemException)
    def ours(request: Request, error: ProblemException) -> Response:
        return answer(request, error.status, error.detail, type_=error.type, errors=error.errors)

    @app.exception_handler(HTTPException)
    def theirs(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers) if error.headers else None
        return answer(request, error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = [_of_validation(each) for each in error.errors()]
        detail = "; ".join(f"{e.pointer}: {e.detail}" for e in errors[:5])
        return answer(request, 422, detail, errors=errors)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        log.error("request_failed", path=request.url.path, error=repr(error))
        return answer(request, 500, "The controller's log says more, by the request id.")


def _of_validation(error: dict[str, Any]) -> ProblemError:
    place, *rest = error["loc"]
    path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in rest)
    pointer = path if place == "body" else f"#{place}{path}"
    cause = error.get("ctx", {}).get("error")
    detail = f"{error['msg']}: {cause}" if error["type"] == "json_invalid" else error["msg"]
    return ProblemError(pointer=pointer, detail=detail)


# ---- strict JSON


class StrictRoute(APIRoute):
    """A route whose JSON bodies hold only what JSON, the store and a 64-bit machine can carry."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        return strict_json(await self.body())


def strict_json(body: bytes) -> Any:
    """Like ``json.loads``, without NaN, infinities, numbers past 64 bits, NUL, broken Unicode or
    bottomless nesting: :class:`json.JSONDecodeError` instead.
    """
    return _json(body, _no_constant, _float, _int)


def loose_json(body: bytes) -> Any:
    """The same, but NaN, infinities and numbers past 64 bits are let through (the very long ones as
    an infinity), for a reader that refuses them by their place.
    """
    return _json(body, float, float, _int_or_infinity)


def _json(
    body: bytes,
    constant: Callable[[str], float | None],
    fraction: Callable[[str], float],
    whole: Callable[[str], float],
) -> Any:
    try:
        value = json.loads(
            body.decode(), parse_constant=constant, parse_float=fraction, parse_int=whole
        )
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except UnicodeError:
        raise json.JSONDecodeError("it is not Unicode", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    return value


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a finite number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not a finite number")
    return value


def _int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]} does not fit into 64 bits")
    return int(digits)


def _int_or_infinity(digits: str) -> float:
    return int(digits) if len(digits) <= 20 else math.inf
