"""Trainers that begin at once: a program's own zygote, and trainers that stand by."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from pydantic import JsonValue

from agent.launcher import Exit, LaunchError, Trainer, Zygote
from agent.warm import Warm
from tests.fakes.waiting import until_soon
from tests.fakes.zygotes import Mother, is_alive, run_spec
from trainer.contract import forks
from trainer.contract.progress import StepCommitted
from trainer.contract.spec import Program

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

PROGRAM = """
import os
{first}
with open({told!r}, "a") as told:
    print(os.getpid(), file=told)

def layers(args):
    from torch import nn
    return [nn.Linear(2, 2)]

def dataset(args):
    return [{{"x": i}} for i in range(8)]

def loss(output, batch):
    return output.sum()
"""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


async def adopted(mother: Mother) -> Zygote:
    ours, _ = mother.fork()
    return await Zygote.adopt(ours.detach())


def written(folder: Path, first: str = "") -> Program:
    """A program that tells in ``folder``/told who imports it."""
    source = folder / "program.py"
    source.write_text(PROGRAM.format(first=first, told=str(folder / "told")))
    ends: dict[str, JsonValue] = {"end": {"code": 0}}  # what the fake trainer does
    return Program(source=str(source), workdir=str(folder), args=ends)


async def heard(trainer: Trainer) -> list[object]:
    return [event async for event in trainer.events()]


async def test_a_trainer_that_stands_by_begins_when_it_is_told_to(
    mother: Mother, tmp_path: Path
) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.stand_by()
    assert is_alive(trainer.pid) and not trainer.is_gone
    spec, log = run_spec(steps=2, print="hello", end={"code": 0}), tmp_path / "log"
    trainer.begin(forks.Begin(spec=spec, log_path=str(log)))
    events = await heard(trainer)
    assert [e.step for e in events if isinstance(e, StepCommitted)] == [1, 2]
    assert events[-1] == Exit(code=0) and log.read_text() == "hello"
    await zygote.close()


async def test_a_trainer_that_stands_by_dies_with_its_owner(mother: Mother) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.stand_by()
    await zygote.close()
    assert not is_alive(trainer.pid)


async def test_a_program_is_imported_once_for_all_trainers_of_its_zygote(
    mother: Mother, tmp_path: Path
) -> None:
    base = await adopted(mother)
    zygote = await base.loading(written(tmp_path), tmp_path / "program.log")
    told = (tmp_path / "told").read_text()
    assert told == f"{zygote.pid}\n"
    for number in range(2):
        log = tmp_path / f"log-{number}"
        trainer = await zygote.start_trainer(run_spec(end={"code": 0}), log)
        assert (await heard(trainer))[-1] == Exit(code=0)
    assert (tmp_path / "told").read_text() == told
    await zygote.close()
    await until_soon(lambda: not is_alive(int(told)))
    await base.close()


@pytest.mark.parametrize(
    ("first", "because"),
    [
        ("import threading; threading.Thread(target=lambda: threading.Event().wait(), daemon=True"
         ").start()", "starts threads"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", "starts processes"),
        ("import sys; kept = open(sys.executable)", "keeps files open"),
        ("raise KeyError('gone')", "importing program.py raised KeyError"),
    ],
)  # fmt: skip
async def test_a_program_that_no_fork_would_have_whole_is_refused_with_the_reason(
    mother: Mother, tmp_path: Path, first: str, because: str
) -> None:
    base = await adopted(mother)
    with pytest.raises(LaunchError, match=because):
        await base.loading(written(tmp_path, first), tmp_path / "program.log")
    await base.close()


@pytest.mark.parametrize("how", ["given up", "its base is killed", "its base's owner goes"])
async def test_a_program_that_is_still_loading_keeps_nothing_alive(
    mother: Mother, tmp_path: Path, how: str
) -> None:
    ours, pid = mother.fork()
    base = await Zygote.adopt(ours.detach())
    told = tmp_path / "pid"
    hangs = f"import time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    loading = asyncio.ensure_future(base.loading(written(tmp_path, hangs), tmp_path / "log"))
    await until_soon(lambda: told.exists() and told.read_text())
    its_pid = int(told.read_text())
    if how == "given up":
        loading.cancel()
    elif how == "its base is killed":
        os.kill(pid, signal.SIGKILL)
    else:
        await base.close()
    await until_soon(lambda: not is_alive(its_pid))
    await asyncio.gather(loading, return_exceptions=True)
    await base.close()


async def test_trainers_of_the_program_that_is_warm_were_forked_before(
    mother: Mother, tmp_path: Path
) -> None:
    base = await adopted(mother)
    warm = Warm(base, tmp_path / "program.log", 1)
    program = written(tmp_path)
    spec = run_spec().model_copy(update={"program": program})
    cold = await warm.start_trainer(spec, tmp_path / "log-0")
    assert cold.zygote is base
    await heard(cold)
    await warm.prepare("job_a", program, 1)
    (forked,) = warm.standing_by
    first = await warm.start_trainer(spec, tmp_path / "log-1")
    second = await warm.start_trainer(spec, tmp_path / "log-2")
    assert first.pid == forked and first.zygote is second.zygote is not base
    other = await warm.start_trainer(run_spec(end={"code": 0}), tmp_path / "log-3")
    assert other.zygote is base
    for trainer in (first, second, other):
        assert (await heard(trainer))[-1] == Exit(code=0)
    await warm.let_go()
    await base.close()


async def test_a_trainer_that_died_while_it_stood_by_is_not_the_one_that_is_started(
    mother: Mother, tmp_path: Path
) -> None:
    base = await adopted(mother)
    warm, program = Warm(base, tmp_path / "program.log", 1), written(tmp_path)
    await warm.prepare("job_a", program, 1)
    (waiting,) = warm.standing_by
    os.kill(waiting, signal.SIGKILL)
    await until_soon(lambda: not warm.standing_by)
    spec = run_spec().model_copy(update={"program": program})
    trainer = await warm.start_trainer(spec, tmp_path / "log")
    assert (await heard(trainer))[-1] == Exit(code=0)
    await warm.let_go()
    await base.close()


async def test_another_program_takes_the_place_of_the_one_that_was_warm(
    mother: Mother, tmp_path: Path
) -> None:
    base = await adopted(mother)
    warm = Warm(base, tmp_path / "program.log", 1)
    pids = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        await warm.prepare(f"job_{name}", written(tmp_path / name), 1)
        pids.append(int((tmp_path / name / "told").read_text()))
    await until_soon(lambda: not is_alive(pids[0]))
    assert is_alive(pids[1])
    await warm.let_go()
    await until_soon(lambda: not is_alive(pids[1]))
    await base.close()


async def test_what_is_being_let_go_ends_though_who_asked_for_it_is_cancelled(
    mother: Mother, tmp_path: Path
) -> None:
    base = await adopted(mother)
    warm = Warm(base, tmp_path / "program.log", 1)
    await warm.prepare("job_a", written(tmp_path), 2)
    zygote, waiting = int((tmp_path / "told").read_text()), warm.standing_by
    other = asyncio.ensure_future(warm.prepare("job_b", written(tmp_path), 1))
    while warm.job == "job_a":  # it has not begun to let go
        await asyncio.sleep(0)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await warm.let_go()
    assert len(waiting) == 2 and not any(map(is_alive, waiting))
    await until_soon(lambda: not is_alive(zygote))
    await base.close()
