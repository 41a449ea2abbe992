"""The one place where things are put together: store, clock, reconciler, routers, pages."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI

from controller.api import (
    agents,
    bundles,
    errors,
    fleet,
    health,
    jobs,
    metrics,
    plans,
    stream,
    submit,
)
from controller.api.auth import Door, Logins
from controller.bell import Bell
from controller.clock import Clock, SystemClock
from controller.cloud.local import machine_boot_id
from controller.dashboard import pages
from controller.logs import Logs
from controller.parts import Parts
from controller.presence import Presence
from controller.reconciler import Reconciler, say_started
from controller.settings import Settings
from controller.store.engine import Store
from controller.store.tokens import Role, Token, Tokens

TOKEN_FILES = {Role.ADMIN: "admin.token", Role.AGENT: "agent.token"}
_THREADS = 32
_ROUTERS = (
    agents.router,
    submit.router,
    jobs.router,
    fleet.router,
    bundles.router,
    stream.router,
    health.router,
    plans.router,
    metrics.router,
)


def create_app(settings: Settings, clock: Clock | None = None) -> FastAPI:
    """The controller as an ASGI app; its parts live from startup to shutdown (lifespan)."""
    app = FastAPI(
        title="Varuna",
        version=version("varuna-spot"),
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(settings, clock or SystemClock()),
    )
    app.add_middleware(Door)
    errors.install(app)
    for router in _ROUTERS:
        app.include_router(router)
    pages.install(app)
    return app


def _lifespan(
    settings: Settings, clock: Clock
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="reader"))
        parts = await asyncio.to_thread(_open, settings, clock, loop)
        app.state.parts = parts
        app.state.logins = Logins(parts)
        await say_started(parts)
        reconciling = asyncio.create_task(Reconciler(parts).run())
        try:
            yield
        finally:
            parts.close_down()
            await reconciling
            await asyncio.to_thread(parts.store.close)

    return lifespan


def _open(settings: Settings, clock: Clock, loop: asyncio.AbstractEventLoop) -> Parts:
    """Migrate, open, load: all that a controller remembers is in its folder. Who lives is not: each
    agent registers again, and says what runs there.
    """
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = Store(settings.database_url)
    tokens = Tokens(store)
    for role in TOKEN_FILES:
        _ensure_token(tokens, token_file(settings, role), role, clock.now())
    return Parts(
        settings=settings,
        clock=clock,
        store=store,
        tokens=tokens,
        presence=Presence(),
        bell=Bell(),
        logs=Logs(settings.data / "logs", settings.log_cap_bytes),
        loop=loop,
        boot_id=machine_boot_id(),
        looked_at=clock.now(),
    )


def token_file(settings: Settings, role: Role) -> Path:
    """Where the first token of a role lies, readable by its owner alone."""
    return settings.data / TOKEN_FILES[role]


def _ensure_token(tokens: Tokens, path: Path, role: Role, now: float) -> None:
    """The file's token opens the door, whether or not the store is as old as the file."""
    if path.exists() and (plain := path.read_text().strip()):
        if tokens.check(plain, now) is None:
            tokens.admit(plain, Token(role, path.name, None), now)
        return
    write_private(path, tokens.create(role, path.name, now) + "\n")


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, mode 0600."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(part, path)
