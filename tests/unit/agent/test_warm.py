"""For whom a program is kept warm."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agent.warm import Warm
from tests.fakes.zygotes import run_spec


class Base:
    """Counts the programs that are loaded; every trainer is named by the zygote it comes from."""

    def __init__(self) -> None:
        self.loaded = 0

    async def loading(self, *_: object) -> Any:
        self.loaded += 1
        name = f"own {self.loaded}"

        async def fork(*_: object) -> str:
            return name

        async def close() -> None:
            pass

        return SimpleNamespace(lost=asyncio.Event(), start_trainer=fork, close=close)

    async def start_trainer(self, *_: object) -> str:
        return "base"


def test_what_is_warm_for_one_job_is_not_given_to_another() -> None:
    async def story() -> None:
        base, tasks = Base(), list[asyncio.Task[None]]()
        warm = Warm(
            cast(Any, base), Path("log"), 1, lambda work: tasks.append(asyncio.create_task(work))
        )

        async def started(job: str) -> object:
            return await warm.start_trainer(run_spec().model_copy(update={"job": job}), Path("log"))

        async def prepared() -> None:
            warm.prepare(run_spec().program, 0)
            await asyncio.gather(*tasks)

        assert await started("a") == "base"
        await prepared()
        assert await started("a") == "own 1"
        assert await started("b") == "base"
        await prepared()
        assert await started("b") == "own 2"

    asyncio.run(story())


def test_a_program_that_is_still_being_loaded_holds_up_no_end() -> None:
    async def story() -> None:
        tasks = list[asyncio.Task[None]]()

        async def loading(*_: object) -> None:
            await asyncio.Event().wait()

        base = cast(Any, SimpleNamespace(loading=loading))
        warm = Warm(base, Path("log"), 1, lambda work: tasks.append(asyncio.create_task(work)))
        warm.prepare(run_spec().program, 1)
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await warm.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())
