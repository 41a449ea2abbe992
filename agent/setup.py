"""A job's `setup` lines: run once per bundle on this machine, before a trainer of it is forked.

Each line is a shell command of its own (``/bin/sh -c``) in the bundle's folder, started by the
zygote: so it dies with the agent, and whatever it leaves running is killed. That it is done is
written down beside the bundle, for these very lines and this Python. A launch that is superseded
does not start it over: who comes next waits for the one that runs, and only when nobody has wanted
it for a while is it killed.
"""

import asyncio
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from agent import wire
from agent.launcher import Exit, Zygote
from agent.logs import tail
from agent.sweep import Sessions

_UNWANTED_SECONDS = 10.0
"""So long it goes on when nobody waits for it any more: time for the next launch to come."""


class SetupError(Exception):
    """A line failed, or all of them took too long; a sentence without its full stop."""


@dataclass(eq=False)
class _Run:
    task: "asyncio.Task[None]"
    log: Path
    wanted: int = 0
    """Who waits for it."""


class Setups:
    """What was set up here, and what is being."""

    def __init__(self, zygote: Zygote, sessions: Sessions) -> None:
        self._zygote = zygote
        self._sessions = sessions
        self._running: dict[tuple[Path, str], _Run] = {}

    def is_done(self, setup: wire.Setup, folder: Path) -> bool:
        """Whether these lines have run in the bundle's ``folder``, to the end."""
        return _record(folder, setup).is_file()

    async def wait_for(self, setup: wire.Setup, folder: Path, log: Path) -> None:
        """Run the lines in ``folder`` unless that is done; their output goes to ``log``, or to
        whose who began it. Raises SetupError, LaunchError, OSError.
        """
        if self.is_done(setup, folder):
            return
        key = folder, _digest(setup)
        while (dying := self._running.get(key)) and dying.task.cancelling():
            await asyncio.wait([dying.task])
        if key in self._running:
            _note(log, "waiting for `setup`, which an earlier start here runs")
        else:
            task = asyncio.create_task(self._run(setup, folder, log))
            self._running[key] = _Run(task, log)
            task.add_done_callback(lambda task: self._forget(key, task))
        run = self._running[key]
        run.wanted += 1
        try:
            await asyncio.shield(run.task)
        finally:
            run.wanted -= 1
            asyncio.get_running_loop().call_later(_UNWANTED_SECONDS, _end_unwanted, run)

    @property
    def folders(self) -> set[str]:
        """The names of those in which something runs."""
        return {folder.name for folder, _ in self._running}

    async def until_written(self, log: Path) -> None:
        """Wait until nothing more is written to ``log``."""
        await asyncio.gather(
            *(run.task for run in self._running.values() if run.log == log), return_exceptions=True
        )

    async def end_all(self) -> None:
        """Kill what runs; it is gone on return."""
        tasks = [run.task for run in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: tuple[Path, str], task: "asyncio.Task[None]") -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # who waited for it has it

    async def _run(self, setup: wire.Setup, folder: Path, log: Path) -> None:
        try:
            async with asyncio.timeout(setup.timeout_seconds):
                for number, line in enumerate(setup.lines, 1):
                    _note(log, f"setup, line {number} of {len(setup.lines)}: {line}")
                    _check(await self._execute(line, folder, log), number, line, log)
        except TimeoutError:
            raise SetupError(
                f"`setup` was not done after {setup.timeout_seconds:g} s"
                f" (line {number}: {_short(line)}); `setup_timeout` gives it longer"
            ) from None
        _note(log, "setup is done")
        _record(folder, setup).write_text(json.dumps(setup.lines))

    async def _execute(self, line: str, folder: Path, log: Path) -> Exit:
        command = await self._zygote.start_command(line, folder, log)
        self._sessions.add(command.pid)
        try:
            return await command.ended()
        finally:
            await command.kill()
            self._sessions.remove(command.pid)


def _end_unwanted(run: _Run) -> None:
    if not run.wanted:
        run.task.cancel()


def _check(by: Exit, number: int, line: str, log: Path) -> None:
    if by.code == 0:
        return
    said = [text.strip() for text in tail(log).splitlines() if text.strip()]
    words = f": {said[-1][:300]}" if said and not said[-1].startswith("[varuna]") else ""
    raise SetupError(f"`setup` line {number} ({_short(line)}) ended with {by}{words}")


def _record(folder: Path, setup: wire.Setup) -> Path:
    """Beside the bundle's folder: what was set up there."""
    return folder.with_name(f"{folder.name}.setup-{_digest(setup)}")


def _digest(setup: wire.Setup) -> str:
    text = json.dumps([setup.lines, sys.prefix, sys.version])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:79]}…"


def _note(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(f"[varuna] {text}\n")
