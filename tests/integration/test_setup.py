"""`setup` lines on a real agent: once per bundle, bounded, killed whole, told."""

import asyncio
import gzip
import hashlib
import io
import signal
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent import setup, wire
from agent.launcher import Zygote
from agent.setup import SetupError, Setups
from agent.sweep import Sessions
from tests.fakes.controller import FakeController
from tests.fakes.waiting import until
from tests.fakes.zygotes import Mother, is_alive
from tests.integration.test_agent import agent, exits, lines, start
from trainer.contract.progress import ExitCode, Failed, Phase, PhaseBegun

pytestmark = pytest.mark.integration

wait = partial(until, seconds=60)
SETUP, BOOT = PhaseBegun(phase=Phase.SETUP), PhaseBegun(phase=Phase.BOOT)
CHILD = "sleep 1000 & echo $! >> pids; setsid sleep 1000 & echo $! >> pids; wait"
"""Leaves a child and one that is in a session of its own."""


def bundled(controller: FakeController, text: str = "a = 1") -> str:
    """The digest of a bundle that the controller has."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("prog.py")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))
    content = gzip.compress(packed.getvalue())
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    controller.bundles[digest] = content
    return digest


def start_with(
    bundle: str, *commands: str, generation: int = 1, seconds: float = 60, **args: Any
) -> wire.Start:
    order = start(generation, **args)
    program = order.spec.program.model_copy(update={"source": "prog.py"})
    lines_ = wire.Setup(lines=commands, timeout_seconds=seconds)
    spec = order.spec.model_copy(update={"program": program})
    return wire.Start(spec=spec, bundle=bundle, setup=lines_)


def folder(state: Path, bundle: str) -> Path:
    return state / "state" / "bundles" / bundle.removeprefix("sha256:")


def failed(controller: FakeController, generation: int) -> list[Failed]:
    return [line for line in lines(controller, generation) if isinstance(line, Failed)]


def test_the_lines_run_once_in_the_bundles_folder_before_its_first_trainer(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    bundle = bundled(controller)
    commands = ("echo b = 2 >> prog.py", "python -c 'import sys; print(sys.prefix)'")
    done: dict[str, Any] = {"source": True, "end": {"code": 0}}
    with agent(mother, controller, tmp_path):
        controller.give(start_with(bundle, *commands, **done))
        wait(lambda: exits(controller) == [(1, 0, None)])
        controller.give(start_with(bundle, *commands, generation=2, **done))
        wait(lambda: exits(controller) == [(1, 0, None), (2, 0, None)])
        wait(lambda: "b = 2" in controller.text("job_a", 1) and controller.text("job_a", 2))
        controller.give(start_with(bundle, "echo c = 3 >> prog.py", generation=3, **done))
        wait(lambda: "c = 3" in controller.text("job_a", 3).partition("is done")[2])
    assert lines(controller, 1) == [SETUP, BOOT]
    assert lines(controller, 2) == [BOOT]
    text = controller.text("job_a", 1).splitlines()
    assert text[0] == "[varuna] setup, line 1 of 2: echo b = 2 >> prog.py"
    assert text[2:4] == [sys.prefix, "[varuna] setup is done"]
    assert controller.text("job_a", 2).split() == ["a", "=", "1b", "=", "2"]


def test_a_line_that_fails_is_told_with_its_last_words_and_is_tried_again(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    bundle = bundled(controller)
    commands = ("true", "echo no such package >&2; exit 3", "touch never")
    with agent(mother, controller, tmp_path):
        for generation in (1, 2):
            controller.give(start_with(bundle, *commands, generation=generation))
            wait(lambda: len(exits(controller)) == generation)  # noqa: B023
        beats = len(controller.beats)
        wait(lambda: len(controller.beats) > beats)
    for generation in (1, 2):
        (line,) = failed(controller, generation)
        assert line.code is ExitCode.SETUP_FAILED
        assert line.message == (
            "rank 0: `setup` line 2 (echo no such package >&2; exit 3) ended with code 3: "
            "no such package"
        )
        assert "no such package\n" in line.details
    assert [code for _, code, _ in exits(controller)] == [ExitCode.SETUP_FAILED] * 2
    assert not (folder(tmp_path, bundle) / "never").exists()


def test_a_launch_that_is_superseded_does_not_start_it_over(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    bundle = bundled(controller)
    command = "echo began >> count; until [ -e go ]; do sleep 0.02; done"
    with agent(mother, controller, tmp_path):
        controller.give(start_with(bundle, command))
        wait((folder(tmp_path, bundle) / "count").exists)
        controller.give(start_with(bundle, command, generation=2, end={"code": 0}))
        wait(lambda: lines(controller, 2) == [SETUP])
        (folder(tmp_path, bundle) / "go").touch()
        wait(lambda: exits(controller) == [(2, 0, None)])
    assert (folder(tmp_path, bundle) / "count").read_text() == "began\n"
    assert lines(controller, 2) == [SETUP, BOOT]


def test_it_dies_with_the_agent(mother: Mother, controller: FakeController, tmp_path: Path) -> None:
    bundle = bundled(controller)
    with agent(mother, controller, tmp_path) as process:
        controller.give(start_with(bundle, CHILD))
        wait(lambda: len(pids(folder(tmp_path, bundle))) == 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait(lambda: not any(map(is_alive, pids(folder(tmp_path, bundle)))))


def pids(bundle: Path) -> list[int]:
    path = bundle / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


class Here:
    """Setups on a zygote of this test's own."""

    def __init__(self, setups: Setups, bundle: Path) -> None:
        self.setups = setups
        self.bundle = bundle
        self.log = bundle.with_name("log")

    async def wait_for(self, command: str, seconds: float = 60) -> None:
        given = wire.Setup(lines=(command,), timeout_seconds=seconds)
        await self.setups.wait_for(given, self.bundle, self.log)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)


def told(mother: Mother, folder: Path, story: Callable[[Here], Any]) -> None:
    """Run ``story`` where an agent would."""

    async def run() -> None:
        ours, _ = mother.fork()
        zygote = await Zygote.adopt(ours.detach())
        (folder / "bundle").mkdir()
        sessions = Sessions(folder / "sessions.json", "boot")
        setups = Setups(zygote, sessions)
        try:
            await story(Here(setups, folder / "bundle"))
        finally:
            await setups.end_all()
            await zygote.close()

    asyncio.run(run())


def test_all_of_it_is_killed_at_its_bound(mother: Mother, tmp_path: Path) -> None:
    async def story(here: Here) -> None:
        with pytest.raises(SetupError, match=r"not done after 1 s \(line 1: .*`setup_timeout`"):
            await here.wait_for(CHILD, seconds=1)
        await here.until(lambda: not any(map(is_alive, pids(here.bundle))))
        assert len(pids(here.bundle)) == 2

    told(mother, tmp_path, story)


def test_all_of_it_is_killed_when_nobody_has_waited_for_it_for_a_while(
    mother: Mother, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_UNWANTED_SECONDS", 0.05)

    async def story(here: Here) -> None:
        waiting = asyncio.create_task(here.wait_for(CHILD))
        await here.until(lambda: len(pids(here.bundle)) == 2)
        waiting.cancel()
        await here.until(lambda: not any(map(is_alive, pids(here.bundle))))
        await here.setups.until_written(here.log)
        await here.wait_for("true")

    told(mother, tmp_path, story)


def test_what_it_leaves_running_is_killed_and_does_not_hold_it_up(
    mother: Mother, tmp_path: Path
) -> None:
    async def story(here: Here) -> None:
        await here.wait_for(CHILD.removesuffix("; wait"))
        await here.until(lambda: not any(map(is_alive, pids(here.bundle))))
        assert here.setups.is_done(
            wire.Setup(lines=(CHILD.removesuffix("; wait"),), timeout_seconds=9), here.bundle
        )

    told(mother, tmp_path, story)


def test_a_line_that_is_no_shell_is_told_by_the_shell(mother: Mother, tmp_path: Path) -> None:
    async def story(here: Here) -> None:
        with pytest.raises(SetupError, match=r"\(no-such x\) ended with code 127: .*not found"):
            await here.wait_for("no-such x")

    told(mother, tmp_path, story)
