"""The one place where a user's side speaks HTTP, and where it finds out to whom.

URL and token: flags, then ``VARUNA_URL`` with ``VARUNA_TOKEN`` or ``VARUNA_TOKEN_FILE``, then what
`varuna serve` or `varuna demo` last wrote to ``$XDG_CONFIG_HOME/varuna/current.json`` (or into
``VARUNA_CONFIG_DIR``, where that is set).

    CliError                 one sentence and the exit code
      UnreachableError       4: no controller answers
      RefusedError           1..6: the controller's problem+json, as one sentence
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from controller.api.schemas import Page, Problem
from controller.specfile import SpecError

V = TypeVar("V", bound=BaseModel)

FAILURE, USAGE, NOT_FOUND, UNREACHABLE, NOT_ALLOWED, CONFLICT = 1, 2, 3, 4, 5, 6
_EXIT_OF_STATUS: Mapping[int, int] = {
    400: USAGE, 401: NOT_ALLOWED, 403: NOT_ALLOWED, 404: NOT_FOUND,
    409: CONFLICT, 412: CONFLICT, 422: USAGE,
}  # fmt: skip


class CliError(Exception):
    """What went wrong, in one sentence for a person, and the exit code that says it to a script."""

    def __init__(self, sentence: str, exit_code: int = FAILURE) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class UnreachableError(CliError):
    """No controller answers."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, UNREACHABLE)


class RefusedError(CliError):
    """The controller said no."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(_sentence(problem), _EXIT_OF_STATUS.get(problem.status, FAILURE))
        self.problem = problem


@dataclass(frozen=True)
class Place:
    """Where a controller is and what opens it."""

    url: str
    token: str


def current_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where serve and demo leave their URL and token file for the next command."""
    if named := environ.get("VARUNA_CONFIG_DIR"):
        return Path(named) / "current.json"
    config = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "varuna" / "current.json"


def find(
    url: str | None, token_file: Path | None, environ: Mapping[str, str] = os.environ
) -> Place:
    """The controller that the flags, the environment or the last serve name."""
    url = url or environ.get("VARUNA_URL")
    token = None if token_file else environ.get("VARUNA_TOKEN")
    if token_file is None and (named := environ.get("VARUNA_TOKEN_FILE")):
        token_file = Path(named)
    if not url or not (token or token_file):
        current = _read_current(current_file(environ))
        url = url or current.get("url")
        if url and current.get("url") == url and not token and token_file is None:
            token_file = Path(current["token_file"])
    if not url:
        raise UnreachableError(
            "No controller is known. Start one with `varuna serve` or `varuna demo`, "
            "or name one with --url and --token-file."
        )
    return Place(url.rstrip("/"), token or _read_token(token_file, url))


def _read_current(path: Path) -> dict[str, str]:
    try:
        current = json.loads(path.read_text())
        return {"url": str(current["url"]), "token_file": str(current["token_file"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_token(path: Path | None, url: str) -> str:
    if path is None:
        raise CliError(
            f"No token for {url}. Give --token-file, VARUNA_TOKEN_FILE or VARUNA_TOKEN.",
            NOT_ALLOWED,
        )
    try:
        return path.read_text().strip()
    except OSError as error:
        raise CliError(
            f"The token file {path} cannot be read: {error.strerror}.", NOT_ALLOWED
        ) from None


def is_loopback(url: str) -> bool:
    """Whether ``url`` is this machine: then no proxy is asked."""
    return httpx2.URL(url).host in ("127.0.0.1", "localhost", "::1")


def job_path(job: str, rest: str = "") -> str:
    """``/api/v1/jobs/<job>`` and what follows; ``job`` is whatever a person typed."""
    return f"/api/v1/jobs/{quote(job, safe='')}{rest}"


class Controller:
    """A controller's REST API. Every answer is a view of :mod:`controller.api.schemas`."""

    def __init__(self, place: Place, transport: httpx2.BaseTransport | None = None) -> None:
        self.place = place
        self._http = httpx2.Client(
            base_url=place.url,
            headers={"Authorization": f"Bearer {place.token}"},
            timeout=httpx2.Timeout(30.0, connect=5.0),
            trust_env=not is_loopback(place.url),
            transport=transport,
        )

    def close(self) -> None:
        """Let go of its connections."""
        self._http.close()

    def check_ready(self) -> None:
        """CliError when it cannot work yet."""
        self._send("GET", "/readyz")

    def get(self, path: str, view: type[V], **query: Any) -> V:
        """One view."""
        return self._parse(view, self._send("GET", path, params=_without_none(query)))

    def all(self, path: str, view: type[V], **query: Any) -> list[V]:
        """Every item, page after page."""
        items: list[V] = []
        after: int | str | None = None
        while True:
            page = self.get(path, Page[view], after=after, **query)  # type: ignore[valid-type]
            items += page.items
            after = page.next
            if after is None:
                return items

    def post(self, path: str, body: object, view: type[V], key: str | None = None) -> V:
        """``key``: the Idempotency-Key, with which a repeated post is one post."""
        headers = {"Idempotency-Key": key} if key else {}
        return self._parse(view, self._send("POST", path, json=body, headers=headers))

    def put(self, path: str, content: bytes, view: type[V]) -> V:
        """Bytes up."""
        headers = {"Content-Type": "application/gzip"}
        return self._parse(view, self._send("PUT", path, content=content, headers=headers))

    def stream(
        self, job: str | None = None, after: int | None = None
    ) -> Iterator[httpx2.ServerSentEvent]:
        """Messages from ``after`` (an event's seq; None: now) on, for ever: the controller's end is
        an :class:`UnreachableError`.
        """
        query = _without_none({"job": job, "after": after})
        headers = {"Accept": "text/event-stream"}
        timeout = httpx2.Timeout(None, connect=5.0)
        try:
            with self._http.stream(
                "GET", "/api/v1/stream", params=query, headers=headers, timeout=timeout
            ) as answer:
                if answer.is_error:
                    answer.read()
                    raise RefusedError(_problem(answer))
                yield from httpx2.EventSource(answer)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None
        raise UnreachableError(f"The controller at {self.place.url} has gone away.")

    def _send(self, method: str, path: str, **how: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, **how)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None
        if answer.is_error:
            raise RefusedError(_problem(answer))
        return answer

    def _parse(self, view: type[V], answer: httpx2.Response) -> V:
        try:
            return view.model_validate_json(answer.content)
        except ValidationError as error:
            raise CliError(
                f"{answer.url} did not answer as a controller of this version does: "
                f"{error.errors()[0]['msg']}."
            ) from None

    def _unreachable(self, error: httpx2.TransportError) -> UnreachableError:
        why = str(error) or type(error).__name__
        return UnreachableError(f"The controller at {self.place.url} does not answer ({why}).")


def _problem(answer: httpx2.Response) -> Problem:
    try:
        return Problem.model_validate_json(answer.content)
    except ValidationError:
        return Problem(
            title=f"{answer.url} answered {answer.status_code}", status=answer.status_code
        )


def _sentence(problem: Problem) -> str:
    """The faults one by one where there are some, else the detail, else the title."""
    if problem.errors:
        return " ".join(
            str(SpecError(fault.pointer, fault.line, fault.detail.rstrip("."), fault.suggestion))
            for fault in problem.errors
        )
    return problem.detail or f"{problem.title}."


def _without_none(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}
