"""A small real controller that speaks the wire on loopback, does as a test says and forgets
nothing.
"""

import asyncio
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agent import wire
from tests.fakes.waiting import until

TOKEN = "vrn_agent_fake"


class FakeController:
    """Orders are given by :meth:`give`; what came is in the public lists."""

    def __init__(self) -> None:
        self.registered: list[wire.Register] = []
        self.beats: list[wire.Beat] = []
        self.reports: list[wire.Report] = []
        """Durable, each once."""
        self.received = 0
        """Reports that came, again or for the first time."""
        self.logs: dict[tuple[str, int, int], list[wire.LogChunk]] = defaultdict(list)
        self.bundles: dict[str, bytes] = {}
        self.knows = False
        """Whether the node is registered; set it False to have it forgotten."""
        self.loses_answers = 0
        """So many reports are made durable without the agent learning of it."""
        self.max_offline_seconds = 3600.0
        self._orders: list[wire.Order] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def give(self, *bodies: wire.OrderBody) -> None:
        """Give standing orders."""
        self._orders += [
            wire.Order(number=len(self._orders) + i, body=body) for i, body in enumerate(bodies, 1)
        ]

    def told(self, kind: type[wire.ReportBody]) -> list[object]:
        """The bodies of the durable reports of ``kind``."""
        return [r.body for r in self.reports if isinstance(r.body, kind)]

    def text(self, job: str, generation: int, rank: int = 0) -> str:
        """A log as it was shipped."""
        return "".join(chunk.text for chunk in self.logs[job, generation, rank])

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Be there; outside of it nobody answers, and the port stays ours."""
        config = uvicorn.Config(
            self._app(), log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        listening = self._listening.dup()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        until(lambda: server.started)
        try:
            yield self
        finally:
            self._is_ending = True
            server.should_exit = True
            thread.join()
            listening.close()

    def close(self) -> None:
        """Give the port back."""
        self._listening.close()

    def _app(self) -> FastAPI:
        self._is_ending = False
        app = FastAPI()

        @app.middleware("http")
        async def _checked(request: Request, answer):  # type: ignore[no-untyped-def]
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return problem(401, "about:blank", "The token is not known.")
            if not self.knows and not request.url.path.endswith("/register"):
                return problem(409, "unknown-incarnation", "Register again.")
            return await answer(request)

        @app.post("/api/v1/agents/register")
        async def _register(hello: wire.Register) -> wire.Registered:
            self.registered.append(hello)
            self.knows = True
            return wire.Registered(
                beat_seconds=0.1,
                max_offline_seconds=self.max_offline_seconds,
                reported=len(self.reports),
            )

        @app.post("/api/v1/agents/{node}/beat")
        async def _beat(beat: wire.Beat) -> wire.BeatAnswer:
            self.beats.append(beat)
            return wire.BeatAnswer(reported=len(self.reports))

        @app.get("/api/v1/agents/{node}/orders")
        async def _orders(after: int, wait: float) -> wire.Orders:
            for _ in range(int(wait * 50)):
                if standing := tuple(o for o in self._orders if o.number > after):
                    return wire.Orders(orders=standing)
                if self._is_ending or not self.knows:
                    break
                await asyncio.sleep(0.02)
            return wire.Orders(orders=())

        @app.post("/api/v1/agents/{node}/reports", response_model=None)
        async def _reports(told: wire.Reports) -> wire.ReportsAnswer | Response:
            self.received += len(told.reports)
            for report in told.reports:
                if report.number == len(self.reports) + 1:
                    self.reports.append(report)
            if self.loses_answers > 0:
                self.loses_answers -= 1
                return problem(503, "about:blank", "Busy.")
            return wire.ReportsAnswer(reported=len(self.reports))

        @app.post("/api/v1/agents/{node}/logs", status_code=204)
        async def _logs(chunk: wire.LogChunk) -> None:
            self.logs[chunk.job, chunk.generation, chunk.rank].append(chunk)

        @app.get("/api/v1/bundles/{digest}")
        async def _bundle(digest: str) -> Response:
            return Response(self.bundles[digest])

        return app


def problem(status: int, type_: str, detail: str) -> JSONResponse:
    return JSONResponse({"type": type_, "title": detail, "detail": detail}, status)
