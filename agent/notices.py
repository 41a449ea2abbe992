"""Being told that this VM is about to go: every cloud's way, as one stream of :class:`Notice`.

    azure   GET …/metadata/scheduledevents        Preempt or Terminate that names this VM
    aws     GET …/meta-data/spot/instance-action  404 until there is one; needs a session token
    gcp     GET …/instance/preempted              hangs until it turns TRUE
    file    a file that someone puts there        a cluster's own scheduler, a drill
    none    nobody says anything

Metadata services stall, forget tokens and answer 500: none of that ends the watching. It is tried
again with a pause that grows, and warned of once until it is over. Each event is told once.

To add a source: a function that looks once and gives what stands, and its line in :func:`source`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

import httpx2
import structlog
from pydantic import BaseModel, BeforeValidator, Field

from agent.metadata import (
    AZURE_COMPUTE,
    AZURE_HEADERS,
    GCP_HEADERS,
    METADATA,
    NoAnswerError,
    Service,
    aws_headers,
    aws_token,
    understood,
)

Kind = Literal["preempt", "terminate"]
"""The cloud wants its VM back, or somebody deletes it."""

_PREEMPT_SECONDS = 30.0
"""What Azure and GCP give at least, where they name no time."""
_POLL_SECONDS = 1.0
_FILE_SECONDS = 0.25
_HANG_SECONDS = 60.0
"""How long GCP is asked to hold its answer back."""
_LONGEST_PAUSE = 5.0
"""Of 30 seconds' warning no more than this is lost to a service that was ill."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Notice:
    """This VM goes at ``deadline`` (``time.monotonic()``), which may have passed."""

    kind: Kind
    deadline: float
    event: str
    """What the cloud calls it; the same event is told once."""
    ack: Callable[[], Awaitable[None]] | None = None
    """Tell the cloud that it need not wait for us any longer; it never fails."""

    @property
    def seconds_left(self) -> float:
        """From now on; 0 when the time is up."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True)
class Withdrawn:
    """The event does not stand any more: this VM stays."""

    event: str


class Watching(Protocol):
    """One source of notices."""

    def watch(self) -> AsyncIterator[Notice | Withdrawn]:
        """All notices for this VM, as they come, each once; and which are taken back. Never ends by
        itself.
        """


def source(where: str, url: str | None = None, *, answer_seconds: float | None = None) -> Watching:
    """The source that ``where`` names: azure, aws, gcp, file:PATH or none.

    ``url`` is another address of its metadata service. Raises ValueError.
    """
    name, _, path = where.partition(":")
    if name == "file" and path:
        return _Watch(_File(Path(path)).look, _FILE_SECONDS)
    if where == "none":
        return _Watch(_nothing, 3600.0)
    if where not in METADATA:
        raise ValueError(f"must be azure, aws, gcp, file:PATH or none, not {where!r}")
    service = Service(url or METADATA[where], answer_seconds)
    match where:
        case "azure":
            return _Watch(_Azure(service).look, _POLL_SECONDS)
        case "aws":
            return _Watch(_Aws(service).look, _POLL_SECONDS)
    return _Watch(_Gcp(service).look, _POLL_SECONDS)


@dataclass(frozen=True)
class _Watch:
    """Looks again and again; ``look`` gives what stands now, or raises NoAnswerError."""

    look: Callable[[], Awaitable[Iterable[Notice]]]
    every_seconds: float

    async def watch(self) -> AsyncIterator[Notice | Withdrawn]:
        told: set[str] = set()
        failures: Iterator[float] | None = None
        while True:
            try:
                notices = tuple(await self.look())
            except NoAnswerError as error:
                if failures is None:
                    log.warning("notices cannot be read, trying again", because=str(error))
                    failures = _pauses(self.every_seconds)
                await asyncio.sleep(next(failures))
                continue
            if failures is not None:
                log.info("notices can be read again")
                failures = None
            for notice in notices:
                if notice.event not in told:
                    told.add(notice.event)
                    yield notice
            for event in sorted(told.difference(notice.event for notice in notices)):
                told.remove(event)
                yield Withdrawn(event)
            await asyncio.sleep(self.every_seconds)


def _pauses(first: float) -> Iterator[float]:
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _nothing() -> tuple[Notice, ...]:
    return ()


def _deadline(moment: datetime, answer: httpx2.Response) -> float:
    """``moment`` on our monotonic clock, by the clock of the service that named it if it tells
    its time: a VM's own may be wrong.
    """
    now = _time(answer.headers.get("Date", "")) or datetime.now(UTC)
    return time.monotonic() + (moment - now).total_seconds()


def _time(text: object) -> datetime | None:
    """A time as HTTP writes it, in UTC; None when it is none."""
    try:
        found = parsedate_to_datetime(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


# --- The clouds -------------------------------------------------------------------------------


class _ScheduledEvent(BaseModel):
    id: str = Field(alias="EventId")
    type: str = Field(alias="EventType")
    status: str = Field(default="Scheduled", alias="EventStatus")
    resources: tuple[str, ...] = Field(default=(), alias="Resources")
    not_before: Annotated[datetime | None, BeforeValidator(_time)] = Field(
        default=None, alias="NotBefore"
    )


class _ScheduledEvents(BaseModel):
    events: tuple[_ScheduledEvent, ...] = Field(alias="Events")


class _Compute(BaseModel):
    name: str = Field(min_length=1)


class _Azure:
    """Scheduled Events: one document for all VMs of the set, in which an event stays, again and
    again, until it has happened.
    """

    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _KINDS: Mapping[str, Kind] = MappingProxyType({"Preempt": "preempt", "Terminate": "terminate"})

    def __init__(self, service: Service) -> None:
        self._service = service
        self._name: str | None = None

    async def look(self) -> list[Notice]:
        answer = await self._service.ask(self._EVENTS, AZURE_HEADERS)
        events = understood(answer, _ScheduledEvents).events
        ours = [event for event in events if event.type in self._KINDS]
        if not ours:
            return []
        name = (await self._own_name()).lower()
        return [
            Notice(self._KINDS[event.type], self._ends(event, answer), event.id, self._ack(event))
            for event in ours
            if name in (resource.lower() for resource in event.resources)
        ]

    async def _own_name(self) -> str:
        if self._name is None:
            answer = await self._service.ask(AZURE_COMPUTE, AZURE_HEADERS)
            self._name = understood(answer, _Compute).name
        return self._name

    def _ends(self, event: _ScheduledEvent, answer: httpx2.Response) -> float:
        if event.status == "Started":
            return time.monotonic()
        if event.not_before is None:
            return time.monotonic() + _PREEMPT_SECONDS
        return _deadline(event.not_before, answer)

    def _ack(self, event: _ScheduledEvent) -> Callable[[], Awaitable[None]]:
        async def start() -> None:
            body = {"StartRequests": [{"EventId": event.id}]}
            try:
                await self._service.ask(self._EVENTS, AZURE_HEADERS, method="POST", body=body)
            except NoAnswerError as error:  # then it begins when it would have begun anyhow
                log.warning("cannot acknowledge the notice", event_id=event.id, because=str(error))

        return start


class _InstanceAction(BaseModel):
    action: str
    time: datetime


class _Aws:
    """A spot interruption by IMDSv2: 404 is the normal answer, and 401 means that the session's
    token has run out.
    """

    _ACTION = "/latest/meta-data/spot/instance-action"

    def __init__(self, service: Service) -> None:
        self._service = service
        self._token: str | None = None

    async def look(self) -> list[Notice]:
        answer = await self._ask()
        if answer.status_code == 401:
            self._token = None
            answer = await self._ask()
        if answer.status_code == 401:
            raise NoAnswerError("the metadata service refuses the token that it has just given")
        if answer.status_code == 404:
            return []
        found = understood(answer, _InstanceAction)
        when = found.time if found.time.tzinfo else found.time.replace(tzinfo=UTC)
        event = f"{found.action}@{when.isoformat()}"
        return [Notice("preempt", _deadline(when, answer), event)]

    async def _ask(self) -> httpx2.Response:
        if self._token is None:
            self._token = await aws_token(self._service)
        return await self._service.ask(self._ACTION, aws_headers(self._token), also=(401, 404))


class _Gcp:
    """``preempted``: the answer is held back until the value changes from the one last seen."""

    _PREEMPTED = "/computeMetadata/v1/instance/preempted"

    def __init__(self, service: Service) -> None:
        self._service = service
        self._etag: str | None = None

    async def look(self) -> list[Notice]:
        answer = await self._service.ask(
            self._PREEMPTED + self._wait(), GCP_HEADERS,
            hang=_HANG_SECONDS if self._etag else 0.0,
        )  # fmt: skip
        said = answer.text.strip().upper()
        if said not in ("TRUE", "FALSE"):
            raise NoAnswerError(f"{answer.url} answers {said[:40]!r}")
        self._etag = answer.headers.get("ETag")
        if said == "FALSE":
            return []
        return [Notice("preempt", time.monotonic() + _PREEMPT_SECONDS, "preempted")]

    def _wait(self) -> str:
        if self._etag is None:
            return ""
        return f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={_HANG_SECONDS:.0f}"


# --- A file -----------------------------------------------------------------------------------


class _Written(BaseModel):
    kind: Kind = "preempt"
    seconds: float = Field(default=_PREEMPT_SECONDS, ge=0, allow_inf_nan=False)
    event: str | None = None


class _File:
    """Whoever puts the file there says that this machine goes: empty, or JSON with any of
    ``kind``, ``seconds`` (from when it was written) and ``event``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def look(self) -> list[Notice]:
        found = await asyncio.to_thread(self._read)
        if found is None:
            return []
        written, age, named = found
        deadline = time.monotonic() + written.seconds - age
        return [Notice(written.kind, deadline, written.event or named)]

    def _read(self) -> tuple[_Written, float, str] | None:
        """What it says, its age in seconds and a name for that."""
        try:
            text, changed = self._path.read_text(), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise NoAnswerError(f"{self._path} cannot be read: {error}") from error
        age = time.time() - changed / 1e9
        if not text.strip() and 0 <= age < _FILE_SECONDS:  # its writer may be at it
            return None
        try:
            content: Any = json.loads(text) if text.strip() else {}
            written = _Written.model_validate(content)
        except ValueError as error:
            raise NoAnswerError(f"{self._path} is not (yet) a notice: {error}") from error
        return written, max(0.0, age), f"file-{changed}"
