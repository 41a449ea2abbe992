"""A TCP proxy in a thread of its own: it can be reloaded, and slow in what clients send."""

import asyncio
import contextlib
import random
import threading
from typing import Self


class Proxy:
    """Passes bytes on to a port of this machine. A context manager."""

    def __init__(self, to_port: int, *, seed: int = 0) -> None:
        self.slowest = 0.0
        """What clients send is held back at random up to so many seconds."""
        self._to_port = to_port
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def reload(self) -> None:
        """All connections end at once; new ones are taken right after."""
        asyncio.run_coroutine_threadsafe(self._reload(), self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _reload(self) -> None:
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        await self._listen()

    async def _close(self) -> None:
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        for coroutine in (self._pass(reader, out, is_up=True), self._pass(there, writer)):
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool = False
    ) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError):
            while text := await reader.read(65536):
                if is_up and self.slowest:
                    await asyncio.sleep(self._random.uniform(0, self.slowest))
                writer.write(text)
                await writer.drain()
        self._open.discard(writer)
        writer.close()
