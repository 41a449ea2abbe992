"""A real controller (uvicorn, SQLite, reconciler) in a thread of the test's process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from controller.app import TOKEN_FILES, create_app, token_file
from controller.parts import Parts
from controller.settings import Settings
from controller.store.tokens import Role


class Served:
    """Answers at ``url``; ``parts`` are its insides, for the white of a test's eye."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.app = create_app(settings)
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=settings.port, access_log=False, log_level="warning",
            lifespan="on", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._socket = config.bind_socket()
        self._server = uvicorn.Server(config)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def parts(self) -> Parts:
        parts: Parts = self.app.state.parts
        return parts

    def token(self, role: Role) -> str:
        if role in TOKEN_FILES:
            return token_file(self.settings, role).read_text().strip()
        return self.parts.tokens.create(role, f"a {role}", self.parts.clock.now())

    def client(self, role: Role = Role.ADMIN, **more: Any) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.token(role)}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=10, **more)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise AssertionError("the controller did not start")
            threading.Event().wait(0.005)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.parts.loop.call_soon_threadsafe(self.parts.close_down)
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the controller did not stop"


def settings_at(folder: Path, **more: Any) -> Settings:
    """Quick ones: a node is lost after a second, a launch waits hardly at all."""
    quick = {"lost_after": 1.0, "suspect_after": 0.5, "coalesce": 0.05, "tick": 0.05}
    return Settings(
        data=folder / "data", config_dir=folder / "config", **{"port": 0, **quick, **more}
    )


@contextlib.contextmanager
def served(folder: Path, **more: Any) -> Iterator[Served]:
    """From start to stop."""
    running = Served(settings_at(folder, **more))
    running.start()
    try:
        yield running
    finally:
        running.stop()
