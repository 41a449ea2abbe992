"""Notices of an eviction, from real HTTP servers on loopback that behave as the clouds do."""

import asyncio
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from agent import wire
from agent.daemon import _pass_on_notices
from agent.notices import Notice, Withdrawn, source
from agent.settings import Settings
from tests.fakes.metadata import Answer, Asked, metadata
from tests.fakes.waiting import until_soon

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rhythm, a hundred times as fast."""
    monkeypatch.setattr("agent.notices._POLL_SECONDS", 0.01)
    monkeypatch.setattr("agent.notices._LONGEST_PAUSE", 0.05)


def told(
    where: str, url: str | None = None, *, until: Callable[[list[Notice]], object]
) -> list[Notice]:
    """What the source tells up to the moment when ``until`` holds."""
    notices: list[Notice] = []

    async def listen() -> None:
        async for notice in source(where, url, answer_seconds=0.3).watch():
            if isinstance(notice, Notice):
                notices.append(notice)

    async def story() -> None:
        listening = asyncio.create_task(listen())
        await until_soon(lambda: until(notices) or listening.done())
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening

    asyncio.run(story())
    return notices


def http_time(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


# --- AWS: scenario 7 ----------------------------------------------------------------------------


class Imds:
    """IMDSv2: ``tokens`` counts those given out; only the newest is good."""

    def __init__(self, *answers: Answer) -> None:
        """What instance-action answers with a good token; the last one for ever."""
        self.answers = list(answers)
        self.tokens = 0

    def __call__(self, asked: Asked) -> Answer:
        if asked.path == "/latest/api/token":
            assert (asked.method, asked.headers["X-aws-ec2-metadata-token-ttl-seconds"]) == (
                "PUT", "21600",
            )  # fmt: skip
            self.tokens += 1
            return Answer(text=f"token-{self.tokens}")
        assert asked.path == "/latest/meta-data/spot/instance-action"
        if asked.headers["X-aws-ec2-metadata-token"] != f"token-{self.tokens}":
            return Answer(401)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def action(seconds: float = 120) -> Answer:
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    body = {"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return Answer(text=json.dumps(body))


def test_a_quiet_then_ill_metadata_service_tells_its_notice_once() -> None:
    """404 x 20, an expired token, 500, a stall, then the notice, again and again."""
    stalled = threading.Event()
    imds = Imds(*[Answer(404)] * 20, Answer(500), Answer(500), Answer(stall=stalled), action())

    def answer(asked: Asked) -> Answer:
        if len(imds.answers) == 4 and imds.tokens == 1:
            imds.tokens = 7  # after the quiet the token has run out
        return imds(asked)

    with metadata(answer) as service, capture_logs() as logs:
        seen_after: list[int] = []

        def has_been_told_for_a_while(notices: list[Notice]) -> bool:
            if notices:
                seen_after.append(len(service.asked))
            return bool(notices) and len(service.asked) > seen_after[0] + 3

        notices = told("aws", service.url, until=has_been_told_for_a_while)
        stalled.set()
    assert [(n.kind, n.event.split("@")[0]) for n in notices] == [("preempt", "terminate")]
    assert 110 < notices[0].seconds_left <= 121
    assert notices[0].ack is None
    assert [entry["log_level"] for entry in logs] == ["warning", "info"], logs
    refused = next(i for i, asked in enumerate(service.asked[1:], 1) if asked.method == "PUT")
    assert service.asked[refused + 1].headers["X-aws-ec2-metadata-token"] == "token-8"
    assert imds.tokens == 8, "a new token was fetched for more than the 401"


def test_a_token_that_is_refused_at_once_is_no_reason_to_ask_without_pause() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(text="t") if asked.method == "PUT" else Answer(401)

    with metadata(answer) as service, capture_logs() as logs:
        began = time.monotonic()
        told("aws", service.url, until=lambda _: len(service.asked) >= 20)
        assert time.monotonic() - began > 0.1
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "refuses the token" in logs[0]["because"]


# --- Azure: scenario 8 --------------------------------------------------------------------------


def event(id_: str, kind: str, *names: str, **more: Any) -> dict[str, Any]:
    return {
        "EventId": id_, "EventType": kind, "Resources": list(names), "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine", "NotBefore": http_time(30), "Description": "",
        "EventSource": "Platform", "DurationInSeconds": -1, **more,
    }  # fmt: skip


class Azure:
    """Scheduled events, for the VM ``vmss_3``."""

    def __init__(self, *documents: list[dict[str, Any]]) -> None:
        self.documents = list(documents)

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["Metadata"] == "true"
        if asked.path.startswith("/metadata/instance/compute?api-version=2021-02-01"):
            return Answer(text=json.dumps({"name": "vmss_3", "vmId": "x", "priority": "Spot"}))
        assert asked.path == "/metadata/scheduledevents?api-version=2020-07-01"
        if asked.method == "POST":
            return Answer()
        now = self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]
        return Answer(text=json.dumps({"DocumentIncarnation": 1, "Events": now}))


def test_only_a_preemption_that_names_this_vm_is_told_and_once() -> None:
    others = [
        event("1", "Preempt", "vmss_1"),
        event("2", "Reboot", "vmss_3"),
        event("3", "Freeze", "vmss_3", NotBefore=""),
    ]
    ours = event("4", "Preempt", "vmss_1", "VMSS_3")
    started = event("4", "Preempt", "vmss_3", EventStatus="Started", NotBefore="")
    azure = Azure([], others, [*others, ours], [*others, ours], [started])
    with metadata(azure) as service:
        seen: list[int] = []

        def told_and_gone(notices: list[Notice]) -> bool:
            if len(azure.documents) == 1:
                seen.append(len(service.asked))
            return bool(seen) and len(service.asked) > seen[0] + 2

        notices = told("azure", service.url, until=told_and_gone)
    assert [(n.kind, n.event) for n in notices] == [("preempt", "4")]
    assert 25 < notices[0].seconds_left <= 31
    assert sum("/instance/" in path for path in service.paths()) == 1, "asked for its name again"


def test_the_time_left_is_counted_by_the_clock_of_the_service() -> None:
    """Its clock is an hour ahead of ours; the VM is deleted by somebody five minutes from now."""
    deleted = event("9", "Terminate", "vmss_3", NotBefore=http_time(3600 + 300))
    azure = Azure([deleted])

    def answer(asked: Asked) -> Answer:
        said = azure(asked)
        return Answer(said.status, said.text, {"Date": http_time(3600)})

    with metadata(answer) as service:
        (notice,) = told("azure", service.url, until=bool)
    assert notice.kind == "terminate"
    assert 295 < notice.seconds_left <= 301


@pytest.mark.parametrize(
    ("more", "least", "most"),
    [({"EventStatus": "Started", "NotBefore": ""}, 0, 0), ({"NotBefore": ""}, 25, 30)],
)
def test_a_preemption_without_a_time_has_begun_or_has_the_least_that_azure_gives(
    more: dict[str, str], least: float, most: float
) -> None:
    with metadata(Azure([event("4", "Preempt", "vmss_3", **more)])) as service:
        (notice,) = told("azure", service.url, until=bool)
    assert least <= notice.seconds_left <= most


def test_a_notice_is_acknowledged_by_its_event_and_a_failure_of_that_is_only_said() -> None:
    azure, refuses = Azure([event("4", "Preempt", "vmss_3")]), False

    def answer(asked: Asked) -> Answer:
        return Answer(500) if refuses and asked.method == "POST" else azure(asked)

    with metadata(answer) as service:
        (notice,) = told("azure", service.url, until=bool)
        assert notice.ack
        asyncio.run(acknowledge(notice))
        posted = [asked.body for asked in service.asked if asked.method == "POST"]
        assert [json.loads(body) for body in posted] == [{"StartRequests": [{"EventId": "4"}]}]
        refuses = True
        with capture_logs() as logs:
            asyncio.run(acknowledge(notice))
    assert "answers 500" in logs[0]["because"]


async def acknowledge(notice: Notice) -> None:
    assert notice.ack
    await notice.ack()


def test_the_cloud_may_go_ahead_when_nothing_has_run_for_a_while_and_all_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.daemon._IDLE_SECONDS", 0.2)
    runs = [wire.RunningTrainer(job="j", generation=1, rank=0, phase="step")]
    told: list[wire.Noticed] = []
    node = Mock(running=lambda: tuple(runs), is_uploading=False)
    talk = Mock(report=told.append, all_told=AsyncMock())

    async def story(url: str) -> None:
        settings = Settings(
            controller="http://127.0.0.1:1", token_file=Path("t"), notices="azure", notices_url=url
        )
        async with asyncio.TaskGroup() as group:
            passing = group.create_task(_pass_on_notices(settings, node, talk, group.create_task))
            await until_soon(lambda: told)
            talk.all_told.assert_not_called()
            asked = len(service.asked)
            began = time.monotonic()
            await until_soon(lambda: time.monotonic() > began + 0.5 and len(service.asked) > asked)
            assert service.paths("POST") == [], "acknowledged while a trainer runs"
            runs.clear()
            await until_soon(lambda: service.paths("POST"))
            talk.all_told.assert_awaited_once()
            passing.cancel()

    with metadata(Azure([event("4", "Preempt", "vmss_3")])) as service:
        asyncio.run(story(service.url))
    (noticed,) = told
    assert (noticed.notice, noticed.event) == ("preempt", "4")
    assert noticed.seconds_left is not None and 25 < noticed.seconds_left <= 31


# --- GCP ----------------------------------------------------------------------------------------


def test_a_preemption_on_gcp_ends_the_hanging_request() -> None:
    is_preempted = threading.Event()

    def answer(asked: Asked) -> Answer:
        assert asked.headers["Metadata-Flavor"] == "Google"
        path = "/computeMetadata/v1/instance/preempted"
        if asked.path == path:
            return Answer(text="FALSE", headers={"ETag": "e1"})
        if asked.path == f"{path}?wait_for_change=true&last_etag=e1&timeout_sec=60":
            assert is_preempted.wait(30)
            return Answer(text="TRUE", headers={"ETag": "e2"})
        return Answer(stall=over)

    over = threading.Event()
    with metadata(answer) as service:

        def told_after_a_hang(notices: list[Notice]) -> bool:
            if len(service.asked) == 2 and not hung.done:
                hung.look()
            if hung.done:
                is_preempted.set()
            return bool(notices) and len(service.asked) > 2

        hung = _Hang(0.5)  # longer than an answer may take otherwise
        notices = told("gcp", service.url, until=told_after_a_hang)
        over.set()
    assert [(n.kind, n.event) for n in notices] == [("preempt", "preempted")]
    assert 25 < notices[0].seconds_left <= 30


class _Hang:
    """Whether something has gone on for ``seconds`` since it was first looked at."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self.done = False

    def look(self) -> None:
        self._until = self._until or time.monotonic() + self._seconds
        self.done = time.monotonic() > self._until


# --- A file, and what is no source --------------------------------------------------------------


def test_a_file_is_a_notice_from_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text('{"kind": "terminate", "seconds": 60, "event": "maintenance-7"}')
    ten_ago = time.time() - 10
    os.utime(path, (ten_ago, ten_ago))
    (notice,) = told(f"file:{path}", until=bool)
    assert (notice.kind, notice.event) == ("terminate", "maintenance-7")
    assert 45 < notice.seconds_left <= 50


def test_a_file_that_was_just_made_is_read_when_it_has_been_written(tmp_path: Path) -> None:
    path, looks = tmp_path / "notice", 0

    def write_late(notices: list[Notice]) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            path.touch()
        elif looks == 4:
            path.write_text('{"seconds": 20, "event": "whole"}')
        return bool(notices)

    (notice,) = told(f"file:{path}", until=write_late)
    assert notice.event == "whole"


def test_an_empty_file_is_a_preemption_and_touching_it_anew_another_one(tmp_path: Path) -> None:
    path, moments = tmp_path / "notice", itertools.count(int(time.time()) - 10_000)

    def touch(notices: list[Notice]) -> bool:
        if not path.exists() or len(notices) == 1:
            path.touch()
            moment = next(moments)
            os.utime(path, (moment, moment))
        return len(notices) > 1

    first, second = told(f"file:{path}", until=touch)[:2]
    assert first.kind == second.kind == "preempt" and first.event != second.event


def test_a_file_that_is_not_whole_yet_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text('{"seconds": 3')

    def mend(notices: list[Notice]) -> bool:
        if logs:
            path.write_text('{"seconds": 30}')
        return bool(notices)

    with capture_logs() as logs:
        (notice,) = told(f"file:{path}", until=mend)
    assert notice.seconds_left > 20
    assert "not (yet) a notice" in logs[0]["because"]


@pytest.mark.parametrize("where", ["azur", "file:", "file", ""])
def test_what_is_no_source_is_refused_by_name(where: str) -> None:
    with pytest.raises(ValueError, match="azure, aws, gcp, file:PATH or none"):
        source(where)


def test_a_file_that_is_gone_takes_its_notice_back_and_a_new_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"

    async def story() -> list[object]:
        watching = source(f"file:{path}").watch()
        path.write_text('{"seconds": 30, "event": "m-7"}')
        seen: list[object] = [await anext(watching)]
        path.unlink()
        seen.append(await anext(watching))
        path.write_text('{"seconds": 30, "event": "m-7"}')
        return [*seen, await anext(watching)]

    async def bounded() -> list[object]:
        async with asyncio.timeout(20):
            return await story()

    first, second, third = asyncio.run(bounded())
    assert isinstance(first, Notice) and isinstance(third, Notice)
    assert second == Withdrawn("m-7")
