"""The shell around the decisions: standing still, one job's mistake, when a loss began."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent import wire
from controller import reconciler as shell
from controller.bell import Bell
from controller.core import actions
from controller.core.actions import Decision
from controller.core.states import NodeState
from controller.core.world import World
from controller.logs import Logs
from controller.parts import Parts
from controller.presence import Presence
from controller.reconciler import Reconciler
from controller.store import nodes, tables
from controller.store.engine import Store
from controller.store.snapshot import Snapshots
from controller.store.tokens import Tokens
from tests.fakes.agents import facts
from tests.fakes.clock import FakeClock
from tests.fakes.served import settings_at

pytestmark = pytest.mark.integration

LIFE = "first-life"


def with_parts(folder: Path, story: Callable[[Parts, FakeClock], Awaitable[None]]) -> None:
    """Run ``story`` on an open store with one node, vm-1, just heard."""

    async def run() -> None:
        settings, clock = settings_at(folder, lost_after=5.0), FakeClock()
        settings.data.mkdir()
        store = Store(settings.database_url)
        parts = Parts(
            settings=settings, clock=clock, store=store, tokens=Tokens(store),
            presence=Presence(), bell=Bell(), logs=Logs(settings.data / "logs", 1 << 20),
            loop=asyncio.get_running_loop(), boot_id="here",
        )  # fmt: skip
        join(parts, "vm-1")
        try:
            await story(parts, clock)
        finally:
            store.close()

    asyncio.run(run())


def join(parts: Parts, name: str) -> None:
    asked = wire.Register(node=name, incarnation=LIFE, facts=facts())
    parts.store.write(lambda c: nodes.register(c, asked, parts.clock.now())).result()
    parts.presence.admit((name, LIFE), 0, parts.clock.now())


def states(parts: Parts) -> dict[str, str]:
    with parts.store.read() as connection:
        return {row.name: row.state for row in connection.execute(tables.nodes.select())}


def test_nobody_is_lost_because_we_stood_still(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT of the controller: all nodes look silent, and get time to speak."""

    async def story(parts: Parts, clock: FakeClock) -> None:
        heart = Reconciler(parts)
        await heart.tick()
        clock.pass_(60)
        await heart.tick()
        assert states(parts) == {"vm-1": "ready"}
        clock.pass_(4)
        await heart.tick()
        assert states(parts) == {"vm-1": "ready"}
        clock.pass_(2)
        await heart.tick()
        assert states(parts) == {"vm-1": "lost"}
        assert ("vm-1", LIFE) not in parts.presence

    with_parts(tmp_path, story)


def test_standing_still_in_the_middle_of_a_look_loses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(parts: Parts, clock: FakeClock) -> None:
        heart = Reconciler(parts)
        await heart.tick()
        clock.pass_(4)
        await heart.tick()
        parts.presence.heard(("vm-1", LIFE), clock.pass_(2))
        load = Snapshots.load

        def slowly(*what: Any) -> World:
            clock.pass_(60)
            return load(*what)

        monkeypatch.setattr(Snapshots, "load", slowly)
        join(parts, "vm-2")  # so that a second look follows, a minute later
        await heart.tick()
        assert states(parts) == {"vm-1": "ready", "vm-2": "ready"}

    with_parts(tmp_path, story)


def test_a_new_controller_gives_everybody_time_to_speak(tmp_path: Path) -> None:
    async def story(parts: Parts, clock: FakeClock) -> None:
        clock.pass_(3600)
        await Reconciler(parts).tick()
        assert states(parts) == {"vm-1": "ready"}

    with_parts(tmp_path, story)


def test_one_mistake_of_ours_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = actions.MarkNode("vm-1", LIFE, NodeState.READY, "good")
    absurd = actions.MarkNode("vm-1", LIFE, None, "absurd")  # type: ignore[arg-type]
    looks = iter([(Decision(None, (absurd,), ""), Decision(None, (good,), "")), ()])
    monkeypatch.setattr(shell, "reconcile", lambda *_: next(looks))

    async def story(parts: Parts, _: FakeClock) -> None:
        await Reconciler(parts).tick()
        assert states(parts) == {"vm-1": "ready"}

    with_parts(tmp_path, story)


def test_a_look_that_fails_is_tried_again_and_shows_in_readiness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(parts: Parts, clock: FakeClock) -> None:
        heart = Reconciler(parts)
        with monkeypatch.context() as patch:
            patch.setattr(shell, "reconcile", lambda *_: 1 / 0)
            await heart.tick()
        assert parts.looked_at == 0.0
        clock.pass_(0.25)
        await heart.tick()
        assert parts.looked_at == clock.now()
        assert states(parts) == {"vm-1": "ready"}

    with_parts(tmp_path, story)


def test_when_nodes_were_heard_is_written_down_now_and_then(tmp_path: Path) -> None:
    async def story(parts: Parts, clock: FakeClock) -> None:
        heart = Reconciler(parts)
        parts.presence.heard(("vm-1", LIFE), clock.pass_(2))
        await heart.tick()
        parts.store.write(lambda c: None).result()
        with parts.store.read() as connection:
            (row,) = connection.execute(tables.nodes.select())
        assert row.heard_at == clock.now()

    with_parts(tmp_path, story)
