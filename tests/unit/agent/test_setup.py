"""Who waits for a setup that nobody wanted any more."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent import setup, wire
from agent.launcher import Exit
from agent.setup import Setups


class Commands:
    """A zygote whose first command never ends by itself, and takes its time to be killed."""

    def __init__(self) -> None:
        self.started = 0
        self.may_die = asyncio.Event()

    async def start_command(self, *_: object) -> Any:
        self.started += 1
        first = self.started == 1

        async def ended() -> Exit:
            if first:
                await asyncio.Event().wait()
            return Exit(code=0)

        async def kill() -> None:
            if first:
                await self.may_die.wait()

        return SimpleNamespace(pid=self.started, ended=ended, kill=kill)


def test_who_comes_while_it_is_being_killed_begins_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_UNWANTED_SECONDS", 0.0)
    lines = wire.Setup(lines=("true",), timeout_seconds=60)
    (tmp_path / "bundle").mkdir()

    async def story() -> None:
        zygote = Commands()
        sessions = SimpleNamespace(add=lambda pid: None, remove=lambda pid: None)
        setups = Setups(cast(Any, zygote), cast(Any, sessions))

        def waiting() -> "asyncio.Task[None]":
            return asyncio.create_task(
                setups.wait_for(lines, tmp_path / "bundle", tmp_path / "log")
            )

        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        early = waiting()
        await turns()
        early.cancel()
        await turns()
        late = waiting()
        await turns()
        zygote.may_die.set()
        await late
        assert zygote.started == 2
        assert setups.is_done(lines, tmp_path / "bundle")

    asyncio.run(story())
