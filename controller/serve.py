"""`python -I -u -m controller.serve`: the controller as a process of its own.

data/controller.lock   held as long as it runs: one controller a folder
data/controller.json   {url, pid}, once it answers
data/admin.token, data/agent.token
$XDG_CONFIG_HOME/varuna/current.json   {url, token_file}: where the CLI finds it
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import IO

import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from controller.app import create_app, token_file, write_private
from controller.parts import Parts
from controller.settings import Settings
from controller.store.engine import StoreError
from controller.store.tokens import Role

_GRACE_SECONDS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Flags over the environment over the defaults; the exit code."""
    parser = argparse.ArgumentParser(prog="controller.serve", description="The controller.")
    for name in ("host", "port", "data", "tls-cert", "tls-key"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--insecure-http", action="store_true", default=None)
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    try:
        settings = Settings(**given)
    except ValidationError as refused:
        for error in refused.errors():
            where = ".".join(str(place) for place in error["loc"])
            message = error["msg"].removeprefix("Value error, ")
            print(f"{where + ': ' if where else ''}{message}", file=sys.stderr)
        return 2
    return serve(settings)


def serve(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM; ends within about two seconds whoever is connected."""
    _log_to_stderr()
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.data / "controller.lock").open("a") as lock:
        if not _hold(lock):
            print(f"Another controller runs on {settings.data}.", file=sys.stderr)
            return 1
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            access_log=False,
            log_level="warning",
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        listening = _bind(config)
        if listening is None:
            return 1
        server = _Server(config, app, settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn raises it again when all is closed; that was the wish, not an accident.
            signal.signal(number, lambda *_: None)
        asyncio.run(server.serve(sockets=[listening]))
        return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Says where it is once it answers, and lets all who wait go before it counts them."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._before: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._before = _say_where(self._settings, sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        parts: Parts | None = getattr(self._app.state, "parts", None)
        if parts is not None:
            parts.close_down()
        if self._before is not None:
            _say_who_was_before(self._settings, self._before)
        await super().shutdown(sockets)


def _say_where(settings: Settings, port: int) -> str:
    """Tell the CLI and whoever started us; what the CLI was told before, empty for nothing."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"{settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    admin = token_file(settings, Role.ADMIN).absolute()
    settings.config_dir.mkdir(parents=True, exist_ok=True)
    current = settings.config_dir / "current.json"
    before = current.read_text() if current.is_file() else ""
    write_private(current, json.dumps({"url": url, "token_file": str(admin)}) + "\n")
    # The last word: who finds this file finds everything else in place.
    write_private(
        settings.data / "controller.json", json.dumps({"url": url, "pid": os.getpid()}) + "\n"
    )
    print(f"Controller  {url}\nAdmin token {admin}", flush=True)
    return before


def _say_who_was_before(settings: Settings, before: str) -> None:
    """Where the CLI is still sent to us, send it to the controller that it was sent to before."""
    current = settings.config_dir / "current.json"
    ours = str(token_file(settings, Role.ADMIN).absolute())
    with contextlib.suppress(OSError, ValueError):
        if json.loads(current.read_text()).get("token_file") != ours:
            return
        if before and json.loads(before).get("token_file") != ours:
            write_private(current, before)
        else:
            current.unlink()


def _bind(config: uvicorn.Config) -> socket.socket | None:
    """The listening socket; None, after a sentence, when the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        print(
            f"Cannot listen on {config.host} port {config.port}: {error.strerror}. "
            "Take another with --port; 0 takes a free one.",
            file=sys.stderr,
        )
        return None
    listening.set_inheritable(True)
    return listening


def _hold(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoreError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
