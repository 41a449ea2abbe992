"""For whom a program is kept warm."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.warm import Warm
from tests.fakes.zygotes import run_spec
from trainer.contract.spec import Program

HANGS = "hangs.py"


class Base:
    """Counts the programs that are loaded; every trainer is named by the zygote it comes from."""

    def __init__(self) -> None:
        self.loaded = 0
        self.closed: list[str] = []

    async def loading(self, program: Program, *_: object) -> Any:
        if program.source == HANGS:
            await asyncio.Event().wait()
        self.loaded += 1
        name = f"own {self.loaded}"

        async def fork(*_: object) -> str:
            return name

        async def close() -> None:
            self.closed.append(name)

        return SimpleNamespace(lost=asyncio.Event(), start_trainer=fork, close=close)

    async def start_trainer(self, *_: object) -> str:
        return "base"


def test_what_is_warm_for_one_job_is_not_given_to_another() -> None:
    async def story() -> None:
        base = Base()
        warm = Warm(cast(Any, base), Path("log"), 1)

        async def started(job: str) -> object:
            return await warm.start_trainer(run_spec().model_copy(update={"job": job}), Path("log"))

        assert await started("a") == "base"
        await warm.prepare("a", run_spec().program, 0)
        await warm.prepare("a", run_spec().program, 0)
        assert await started("a") == "own 1"
        assert await started("b") == "base"
        await warm.prepare("b", run_spec().program, 0)
        assert base.closed == ["own 1"]
        assert await started("b") == "own 2"
        assert await started("a") == "base"
        await warm.let_go()
        assert base.closed == ["own 1", "own 2"] and warm.job is None
        assert await started("b") == "base"

    asyncio.run(story())


@pytest.mark.parametrize("then", ["its end", "another program"])
def test_a_program_that_is_still_being_loaded_holds_nothing_up(then: str) -> None:
    async def story() -> None:
        warm = Warm(cast(Any, Base()), Path("log"), 1)
        hangs = Program(source=HANGS)
        loading = asyncio.create_task(warm.prepare("a", hangs, 0))
        await asyncio.sleep(0)
        assert warm.job == "a"
        async with asyncio.timeout(5):
            if then == "its end":
                await warm.let_go()
                assert warm.job is None
            else:
                await warm.prepare("b", run_spec().program, 0)
                assert warm.job == "b"
            await asyncio.wait([loading])
        assert loading.cancelled()

    asyncio.run(story())
