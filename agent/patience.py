"""Blocking work beside the loop, with a bound: a store may stall for ever, an agent must not."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trainer.contract.remote import StoreError

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], seconds: float) -> _T:
    """What ``work`` gives, in a thread of its own that nobody waits for when the time is up.

    Raises StoreError then, and whatever ``work`` raises.
    """
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            given = work()
        except Exception as error:  # it is raised where it is awaited
            done.set_exception(error)
        else:
            done.set_result(given)

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(done)
    except TimeoutError:
        raise StoreError(f"the store has not answered within {seconds:.0f} s") from None
