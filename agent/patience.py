"""Blocking work beside the loop, with a bound: a store may stall for ever, an agent must not."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from trainer.contract.remote import StoreError

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], seconds: float) -> _T:
    """What ``work`` gives, in a thread of its own that nobody waits for when the time is up.

    Raises StoreError then, and whatever ``work`` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(settling: Callable[[], None]) -> None:
        if not done.done():
            settling()

    def run() -> None:
        try:
            given = work()
        except Exception as error:  # it is raised where it is awaited
            failure = error
            settling = lambda: done.set_exception(failure)  # noqa: E731
        else:
            settling = lambda: done.set_result(given)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(settle, settling)

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError:
        raise StoreError(f"the store has not answered within {seconds:.0f} s") from None
