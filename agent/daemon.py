"""``varuna-agent``, one per machine: puts the agent together, and takes it apart when told to end.

It never starts what was not ordered. Its own end, in whatever way, is the end of its trainers: told
to end it lets them leave first; when it is killed, its zygote sees that. Two agents never share a
state folder.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from agent import machine, wire
from agent.bundles import Bundles
from agent.client import Client, RefusedError
from agent.launcher import LaunchError, Zygote
from agent.machine import DriverError, MachineError
from agent.node import Node
from agent.notices import Withdrawn, source
from agent.settings import Settings
from agent.staging import Staging
from agent.sweep import Sessions
from agent.talk import Talk
from agent.warm import Warm
from agent.zone import zone_of

_LEAVE_SECONDS = 3.0
"""What trainers get to leave by themselves when the agent is told to end."""
_LAST_REPORTS_SECONDS = 2.0
_DRIVER_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Between looks at the GPUs while nvidia-smi fails; then the agent ends."""
_IDLE_SECONDS = 5.0
"""A node on which nothing has run for so long after a notice was drained, or was a spare."""

log = structlog.get_logger()


class AgentError(Exception):
    """Why the daemon cannot go on; a sentence."""


def main() -> None:
    """The command line. Exit code 0: told to end; 1: the sentence says why not."""
    _log_to_stderr()
    try:
        settings = Settings(**_flags())
        with _alone_in(settings.folder):
            asyncio.run(_run(settings))
    except ValidationError as error:
        sys.exit("\n".join(_mistake(e["loc"], e["msg"]) for e in error.errors()))
    except (AgentError, LaunchError, MachineError) as error:
        sys.exit(f"varuna-agent: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _flags() -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="varuna-agent",
        description="Train on this machine what a Varuna controller orders.",
        epilog="Every option can be given as VARUNA_AGENT_<NAME> too.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--controller", metavar="URL")
    parser.add_argument("--token-file", metavar="FILE", help="holds a token of role agent")
    parser.add_argument("--ca-file", metavar="FILE", help="who signed the controller's certificate")
    parser.add_argument("--insecure-http", action="store_true", help="trust the network")
    parser.add_argument("--name", help="of this node; the host's name when not given")
    parser.add_argument("--state-dir", metavar="DIR", help="logs and bundles; one agent each")
    parser.add_argument("--zygote-fd", metavar="N", help="an inherited socket to a warm zygote")
    parser.add_argument("--devices", help="auto, cpu or cuda")
    parser.add_argument("--threads", metavar="N", help="of torch, in each trainer; 1")
    parser.add_argument("--notices", metavar="FROM", help="azure, aws, gcp, file:PATH or none")
    parser.add_argument("--notices-url", metavar="URL", help="of another metadata service")
    parser.add_argument(
        "--zone", metavar="NAME", help="where this machine is; else the cloud's word"
    )
    return vars(parser.parse_args())


def _mistake(where: tuple[int | str, ...], message: str) -> str:
    flag = f"--{'-'.join(map(str, where)).replace('_', '-')}: " if where else ""
    return f"varuna-agent: {flag}{message.removeprefix('Value error, ')}"


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the state folder's lock. Raises AgentError when another agent does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "agent.lock").open("a+")
    except OSError as error:
        raise AgentError(f"cannot use {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise AgentError(
                f"another agent (process {lock.read().strip()}) uses {folder}: "
                "stop it, or give this one a --state-dir and a --name of its own"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


async def _run(settings: Settings) -> None:
    """Be the agent until SIGTERM or SIGINT. Raises AgentError, LaunchError, MachineError."""
    being = asyncio.ensure_future(_be(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, being.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await being


async def _be(settings: Settings) -> None:
    devices = await _devices(settings)
    host = machine.data_host(settings.address)
    sessions = Sessions(settings.folder / "sessions.json", machine.boot_id())
    if left := sessions.sweep():
        log.warning("killed what an earlier agent left running", sessions=left)
    async with contextlib.AsyncExitStack() as ending:
        client = _client(settings)
        ending.push_async_callback(client.close)
        zygote, zone = await asyncio.gather(_zygote(settings), _zone(settings))
        ending.push_async_callback(zygote.close)
        port = await zygote.start_store(host)
        hello = wire.Register(
            node=settings.name,
            incarnation=secrets.token_hex(8),
            facts=machine.facts(devices, host, port, zygote.torch_version, zone),
        )
        talk = Talk(client, hello)
        try:
            await talk.begin()
        except RefusedError as error:
            raise AgentError(f"the controller refuses this agent: {error}") from error
        log.info("registered", node=settings.name, incarnation=hello.incarnation, address=host)
        await _serve(settings, zygote, Bundles(settings.folder / "bundles", client), talk, sessions)


async def _devices(settings: Settings) -> tuple[wire.Device, ...]:
    """What trainers run on. A driver that fails (it may just be coming up) is asked again a few
    times; a machine with GPUs is never taken for one without. Raises MachineError.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for pause in _DRIVER_PAUSES:
        try:
            return await asyncio.to_thread(machine.devices, settings.devices, visible)
        except DriverError as error:
            log.warning("cannot see the GPUs, trying again", because=str(error))
        await asyncio.sleep(pause)
    return await asyncio.to_thread(machine.devices, settings.devices, visible)


async def _zone(settings: Settings) -> str | None:
    return settings.zone or await zone_of(settings.notices, settings.notices_url)


async def _zygote(settings: Settings) -> Zygote:
    if settings.zygote_fd is not None:
        return await Zygote.adopt(settings.zygote_fd)
    return await Zygote.start()


async def _serve(
    settings: Settings, zygote: Zygote, bundles: Bundles, talk: Talk, sessions: Sessions
) -> None:
    """Do what is ordered until told to end, or until the zygote is lost: AgentError."""
    try:
        async with asyncio.TaskGroup() as group:
            warm = Warm(zygote, settings.folder / "program.log", settings.threads)
            node = Node(
                warm,
                bundles,
                sessions,
                Staging(settings.folder / "staging"),
                settings.folder / "logs",
                report=talk.report,
                do=group.create_task,
            )
            group.create_task(talk.go_on(node))
            group.create_task(_pass_on_notices(settings, node, talk, group.create_task))
            try:
                await zygote.lost.wait()
                await node.kill_all()
                await _last_reports(talk)
                raise AgentError("the zygote died, and all trainers with it")
            except asyncio.CancelledError:
                log.info("told to end", trainers=len(node.running()))
                await node.leave(_LEAVE_SECONDS)
                await _last_reports(talk)
                raise
    except BaseExceptionGroup as errors:
        for error in errors.exceptions:
            if isinstance(error, AgentError):
                raise error from None
        raise


async def _pass_on_notices(
    settings: Settings,
    node: Node,
    talk: Talk,
    do: Callable[[Coroutine[None, None, None]], object],
) -> None:
    """Report each notice at once, and when it is taken back; let the cloud go ahead when nothing
    runs here any more.
    """
    async for notice in source(settings.notices, settings.notices_url).watch():
        if isinstance(notice, Withdrawn):
            log.info("this machine stays after all", id=notice.event)
            talk.report(wire.NoticeGone(event=notice.event))
            continue
        left = notice.seconds_left
        log.warning("this machine goes", kind=notice.kind, seconds=round(left), id=notice.event)
        talk.report(wire.Noticed(notice=notice.kind, seconds_left=left, event=notice.event))
        if notice.ack:
            do(_acknowledge(notice.ack, node, talk))


async def _acknowledge(ack: Callable[[], Awaitable[None]], node: Node, talk: Talk) -> None:
    """Tell the cloud when this node has been empty for a while and nothing is left to report."""
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < _IDLE_SECONDS:
        await asyncio.sleep(_IDLE_SECONDS / 10)
        if node.running() or node.is_uploading:
            idle_since = time.monotonic()
    await talk.all_told()
    await ack()


async def _last_reports(talk: Talk) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_REPORTS_SECONDS):
            await talk.all_told()


def _client(settings: Settings) -> Client:
    try:
        token = settings.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(f"cannot read {settings.token_file}: {error}") from error
    try:
        return Client(settings.controller, token, settings.name, ca_file=settings.ca_file)
    except OSError as error:
        raise AgentError(f"cannot use {settings.ca_file}: {error}") from error


if __name__ == "__main__":
    main()
