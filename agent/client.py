"""The one place that talks HTTP to the controller.

    ControllerError
      +-- AwayError      no answer, or none that counts (network, 5xx, 429): try again
      +-- UnknownError   409: the controller does not know this incarnation: register again
      +-- RefusedError   any other 4xx: it will be refused again

Calls raise these and nothing else. Waiting for a controller that is away is :meth:`patiently`.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from agent.wire import (
    Beat,
    BeatAnswer,
    LogChunk,
    Order,
    Orders,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
)

API = "/api/v1"
WAIT_SECONDS = 20
"""How long a request for orders is parked."""
_TIMEOUT = httpx2.Timeout(5.0, connect=1.0)
_PARKED = httpx2.Timeout(5.0, connect=1.0, read=WAIT_SECONDS + 5.0)
_LONGEST_PAUSE = 1.0

_Query = dict[str, str | int]
_M = TypeVar("_M", bound=BaseModel)
_T = TypeVar("_T")


class ControllerError(Exception):
    """A call did not give what it is for; the text is a sentence."""


class AwayError(ControllerError):
    """Nobody answered; another try may help."""


class UnknownError(ControllerError):
    """The controller does not know this incarnation."""


class RefusedError(ControllerError):
    """The controller says no, with ``status``."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def is_of_the_body(self) -> bool:
        """What was sent is not understood or too large, whoever sends it."""
        return self.status in (400, 413, 422)


def pauses() -> Iterator[float]:
    """Seconds to wait after each failure in a row: soon first, at least once a second for ever."""
    pause = 0.05
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


class Client:
    """One agent's calls; ``node`` is its name. To be closed."""

    def __init__(
        self,
        url: str,
        token: str,
        node: str,
        *,
        ca_file: Path | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._node = f"{API}/agents/{node}"
        self._sleep = sleep
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            transport=transport,
            trust_env=False,  # the controller is never behind the machine's own proxy
            verify=ssl.create_default_context(cafile=str(ca_file) if ca_file else None),
        )

    async def close(self) -> None:
        """Give up all connections."""
        await self._http.aclose()

    async def patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """The answer of ``call``, tried until the controller is there."""
        for pause in pauses():
            try:
                return await call()
            except AwayError:
                await self._sleep(pause)
        raise AssertionError("pauses never end")

    async def register(self, register: Register) -> Registered:
        """Say who we are."""
        return await self._post(f"{API}/agents/register", register, Registered)

    async def beat(self, beat: Beat) -> BeatAnswer:
        """Say that we live."""
        return await self._post(f"{self._node}/beat", beat, BeatAnswer)

    async def report(self, reports: Reports) -> ReportsAnswer:
        """Hand in reports; the answer says up to where they are durable."""
        return await self._post(f"{self._node}/reports", reports, ReportsAnswer)

    async def log(self, chunk: LogChunk) -> None:
        """Hand in a piece of a log."""
        await self._call("POST", f"{self._node}/logs", chunk)

    async def orders(self, incarnation: str, after: int) -> tuple[Order, ...]:
        """The standing orders above ``after``; parked until there is one or the wait is over."""
        query: _Query = {"incarnation": incarnation, "after": after, "wait": WAIT_SECONDS}
        answer = await self._call("GET", f"{self._node}/orders", query=query, timeout=_PARKED)
        return _understood(answer, Orders).orders

    async def bundle(self, digest: str, take: Callable[[bytes], object]) -> None:
        """Fetch a bundle, handing its bytes to ``take`` as they come."""
        try:
            async with self._http.stream("GET", f"{API}/bundles/{digest}") as answer:
                if answer.is_error:
                    await answer.aread()
                _check(answer)
                async for piece in answer.aiter_bytes():
                    take(piece)
        except httpx2.HTTPError as error:
            raise _away(error) from error

    async def _post(self, path: str, body: BaseModel, wanted: type[_M]) -> _M:
        return _understood(await self._call("POST", path, body), wanted)

    async def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        query: _Query | None = None,
        timeout: httpx2.Timeout = _TIMEOUT,
    ) -> httpx2.Response:
        content = body.model_dump_json() if body else None
        headers = {"Content-Type": "application/json"} if body else None
        try:
            answer = await self._http.request(
                method, path, content=content, headers=headers, params=query, timeout=timeout
            )
        except httpx2.HTTPError as error:
            raise _away(error) from error
        _check(answer)
        return answer


def _understood(answer: httpx2.Response, wanted: type[_M]) -> _M:
    try:
        return wanted.model_validate_json(answer.content)
    except ValidationError as error:
        raise AwayError(f"what answers at {answer.url} is not the controller") from error


def _check(answer: httpx2.Response) -> None:
    if not answer.is_error and not answer.is_redirect:
        return
    problem = _problem(answer)
    sentence = f"{answer.status_code}: {problem.get('detail') or problem.get('title')}"
    if answer.status_code == 409 and str(problem.get("type")).endswith("unknown-incarnation"):
        raise UnknownError(sentence)
    if answer.is_client_error and answer.status_code not in (408, 425, 429):
        raise RefusedError(sentence, answer.status_code)
    raise AwayError(sentence)


def _problem(answer: httpx2.Response) -> dict[str, object]:
    """The problem+json body, or one made of the status' own words."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"title": answer.reason_phrase}


def _away(error: Exception) -> AwayError:
    return AwayError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
