"""The warm process and its owner's end, for real: forks, deaths, orphans."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.launcher import Exit, LaunchError, Trainer, Zygote
from tests.fakes.waiting import until, until_soon
from tests.fakes.zygotes import Mother, is_alive, run_spec
from trainer.contract.progress import Halt, Halted, Leave, Phase, PhaseBegun, StepCommitted

pytestmark = [pytest.mark.integration, pytest.mark.anyio]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


async def heard(trainer: Trainer) -> list[object]:
    return [event async for event in trainer.events()]


async def adopted(mother: Mother) -> Zygote:
    ours, _ = mother.fork()
    return await Zygote.adopt(ours.detach())


def pids_in(path: Path) -> list[int]:
    until(path.exists)
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ({"code": 0}, Exit(code=0)),
        ({"code": 21}, Exit(code=21)),
        ({"signal": signal.SIGSEGV}, Exit(signal=signal.SIGSEGV)),
        ({"raise": "broken"}, Exit(code=26)),
    ],
)
async def test_the_end_of_a_trainer_is_its_exit_code_or_its_signal(
    mother: Mother, tmp_path: Path, end: dict[str, object], seen: Exit
) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.start_trainer(run_spec(steps=2, end=end), tmp_path / "log")
    events = await heard(trainer)
    assert events[0] == PhaseBegun(phase=Phase.BOOT)
    assert [e.step for e in events if isinstance(e, StepCommitted)] == [1, 2]
    assert events[-1] == seen
    await zygote.close()


async def test_orders_reach_a_trainer_and_it_answers(mother: Mother, tmp_path: Path) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.start_trainer(run_spec(), tmp_path / "log")
    trainer.send(Halt())
    trainer.send(Leave())
    events = await heard(trainer)
    assert isinstance(events[1], Halted)
    assert events[-1] == Exit(code=20)
    await zygote.close()


async def test_what_a_trainer_prints_is_in_its_log(mother: Mother, tmp_path: Path) -> None:
    zygote = await adopted(mother)
    log = tmp_path / "log"
    for text in ("first é\n", "again 😀 \n"):
        trainer = await zygote.start_trainer(run_spec(print=text, end={"code": 0}), log)
        assert (await heard(trainer))[-1] == Exit(code=0)
    assert log.read_text() == "first é\nagain 😀 \n"
    await zygote.close()


async def test_a_killed_trainer_is_reported(mother: Mother, tmp_path: Path) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.start_trainer(run_spec(), tmp_path / "log")
    os.kill(trainer.pid, signal.SIGKILL)
    assert (await heard(trainer))[-1] == Exit(signal=signal.SIGKILL)
    await zygote.close()


async def test_a_trainer_that_is_killed_on_order_leaves_its_neighbour_alone(
    mother: Mother, tmp_path: Path
) -> None:
    zygote = await adopted(mother)
    trainer = await zygote.start_trainer(run_spec(rank=0), tmp_path / "log-0")
    neighbour = await zygote.start_trainer(run_spec(rank=1), tmp_path / "log-1")
    await trainer.kill()
    assert await trainer.ended() == Exit(signal=signal.SIGKILL)
    assert is_alive(neighbour.pid)
    neighbour.send(Leave())
    assert (await heard(neighbour))[-1] == Exit(code=20)
    await zygote.close()


async def test_children_that_will_not_go_die_with_their_trainer(
    mother: Mother, tmp_path: Path
) -> None:
    zygote = await adopted(mother)
    there = [tmp_path / "left-0", tmp_path / "left-1"]
    trainers = [
        await zygote.start_trainer(run_spec(rank=i, leave_behind=str(path)), tmp_path / f"log-{i}")
        for i, path in enumerate(there)
    ]
    left, of_neighbour = (pids_in(path) for path in there)
    os.kill(trainers[0].pid, signal.SIGKILL)
    await trainers[0].ended()
    await until_soon(lambda: not any(map(is_alive, left)))
    another = await zygote.start_trainer(run_spec(end={"code": 0}), tmp_path / "log")
    await another.ended()  # one more death to tidy up after
    assert all(map(is_alive, of_neighbour)), "the neighbour's daemon was killed with it"
    await zygote.close()
    assert not any(map(is_alive, of_neighbour))


async def test_a_log_that_cannot_be_made_is_a_refusal(mother: Mother, tmp_path: Path) -> None:
    zygote = await adopted(mother)
    with pytest.raises(LaunchError, match="No such file"):
        await zygote.start_trainer(run_spec(), tmp_path / "missing" / "log")
    with pytest.raises(LaunchError, match="args"):
        await zygote.start_trainer(run_spec(big="x" * 5_000_000), tmp_path / "log")
    await zygote.close()


async def test_a_store_serves_and_comes_back_on_its_port(mother: Mother, tmp_path: Path) -> None:
    zygote = await adopted(mother)
    port = await zygote.start_store("127.0.0.1")
    meet = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', int(sys.argv[1])); "
    code = meet + "s.set('a', 'b'); assert s.get('a') == b'b'"
    client = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", code, str(port))
    assert await client.wait() == 0

    def accepts() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await zygote.kill(zygote.store)
    await zygote.store.gone
    await until_soon(accepts)
    await zygote.close()
    assert not accepts()


def test_an_owner_that_is_killed_leaves_nothing_alive(mother: Mother, tmp_path: Path) -> None:
    """The owner is a process of its own, as an agent is, and gets no chance to tidy up."""
    ours, zygote = mother.fork()
    started, left = tmp_path / "started", tmp_path / "left"
    spec = run_spec(leave_behind=str(left)).model_dump_json()
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(ours.fileno()), spec, str(tmp_path / "log"), started],
        pass_fds=[ours.fileno()],
    )
    ours.close()
    family = [zygote, *pids_in(started), *pids_in(left)]
    assert len(family) == 5 and all(map(is_alive, family))
    owner.kill()
    owner.wait()
    until(lambda: not any(map(is_alive, family)))


_OWNER = """
import asyncio, os, pathlib, sys
from agent.launcher import Zygote
from trainer.contract.spec import RunSpec

async def main(descriptor, spec, log, started):
    zygote = await Zygote.adopt(int(descriptor))
    await zygote.start_store("127.0.0.1")
    trainer = await zygote.start_trainer(RunSpec.model_validate_json(spec), pathlib.Path(log))
    pathlib.Path(started + ".tmp").write_text(f"{trainer.pid} {zygote.store.pid}")
    os.rename(started + ".tmp", started)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_zygote_that_is_killed_takes_its_trainers_along(mother: Mother, tmp_path: Path) -> None:
    async def story() -> None:
        ours, pid = mother.fork()
        zygote = await Zygote.adopt(ours.detach())
        left = tmp_path / "left"
        trainer = await zygote.start_trainer(run_spec(leave_behind=str(left)), tmp_path / "log")
        family = [trainer.pid, *pids_in(left)]
        os.kill(pid, signal.SIGKILL)
        assert (await heard(trainer))[-1] == Exit(signal=signal.SIGKILL)
        assert zygote.lost.is_set()
        await until_soon(lambda: not any(map(is_alive, family)))  # the mother ends the orphans
        with pytest.raises(LaunchError):
            await zygote.start_trainer(run_spec(), tmp_path / "log")
        await zygote.close()

    asyncio.run(story())


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_child_zygote_dies_with_its_own_owner_and_not_with_the_mother(
    tmp_path: Path, is_killed: bool
) -> None:
    """A trainer of the mother's own goes with her: ended by her, or by the kernel."""

    async def story() -> None:
        with Mother() as mother:
            ours, pid = mother.fork()
            hers = mother.start_trainer(run_spec(), tmp_path / "log")
            mother.process.kill() if is_killed else mother.socket.close()
            await until_soon(lambda: not is_alive(hers))
        zygote = await Zygote.adopt(ours.detach())
        trainer = await zygote.start_trainer(run_spec(end={"code": 7}), tmp_path / "log")
        assert (await heard(trainer))[-1] == Exit(code=7)
        await zygote.close()
        await until_soon(lambda: not is_alive(pid))

    asyncio.run(story())


async def test_a_zygote_whose_entry_cannot_be_imported_says_so() -> None:
    with pytest.raises(LaunchError, match="zygote ended"):
        await Zygote.start(entry="no_such_module:run")
