"""A real agent that gets ready for a seat that it does not hold, and what the store knows of it."""

from pathlib import Path

import psutil
import pytest

from agent import wire
from controller.core import actions
from controller.core.states import JobState, Reason
from controller.core.world import Preparation
from controller.store import adoption, tables
from tests.fakes.agents import facts
from tests.fakes.controller import FakeController
from tests.fakes.told import LIFE, SHAPE, WEIGHTS, Told
from tests.fakes.waiting import until
from tests.fakes.zygotes import Mother, is_alive
from tests.integration.test_agent import agent, done, exits, is_running, lines, recorded, start
from tests.integration.test_setup import bundled, start_with
from tests.integration.test_warm import PROGRAM
from trainer.contract.progress import Phase, PhaseBegun

pytestmark = pytest.mark.integration


def written(controller: FakeController, folder: Path, first: str = "") -> str:
    """The digest of a bundle with a program that tells in ``folder``/told who imports it."""
    return bundled(controller, PROGRAM.format(first=first, told=str(folder / "told")))


def order(bundle: str, *setup: str, job: str = "job_a") -> wire.Prepare:
    """To get ready for what :func:`start_with` starts."""
    of = start_with(bundle, *(setup or ("true",)))
    return wire.Prepare(
        job=job, generation=1, program=of.spec.program, bundle=bundle, setup=of.setup, trainers=1
    )


def importer(folder: Path) -> int:
    """The one process that has imported the program."""
    (pid,) = map(int, (folder / "told").read_text().split())
    return pid


def test_a_spare_has_all_ready_when_it_is_given_a_seat_and_nothing_when_the_job_is_over(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    bundle = written(controller, tmp_path)
    setup = f"echo ran >> {tmp_path / 'ran'}"
    with agent(mother, controller, tmp_path):
        controller.give(order(bundle, setup))
        until(lambda: done(controller) == {1: None})
        zygote = importer(tmp_path)
        (standing,) = psutil.Process(zygote).children()
        controller.knows = False
        until(lambda: len(controller.registered) == 2)
        assert [hello.warm_for for hello in controller.registered] == [None, "job_a"]

        controller.give(start_with(bundle, setup, generation=2))
        until(lambda: is_running(controller, 2))
        assert recorded(tmp_path) == standing.pid
        until(lambda: lines(controller, 2))
        assert lines(controller, 2) == [PhaseBegun(phase=Phase.BOOT)], "no setup"
        assert importer(tmp_path) == zygote
        assert (tmp_path / "ran").read_text() == "ran\n"

        controller.give(wire.Release(job="job_a", generation=2))
        until(lambda: done(controller) == {1: None, 2: None, 3: None})
        assert exits(controller) == [(2, None, 9)]
        until(lambda: not (is_alive(zygote) or is_alive(standing.pid)))


@pytest.mark.parametrize(
    ("setup", "first", "because"),
    [
        ("echo no such package; exit 3", "", "ended with code 3: no such package"),
        ("true", "import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_a_spare_that_cannot_get_ready_says_why(
    mother: Mother, controller: FakeController, tmp_path: Path, setup: str, first: str, because: str
) -> None:
    bundle = written(controller, tmp_path, first)
    with agent(mother, controller, tmp_path):
        controller.give(order(bundle, setup))
        until(lambda: done(controller))
        assert because in (done(controller)[1] or "")
        controller.give(start(job="job_b", generation=1, end={"code": 0}))
        until(lambda: exits(controller) == [(1, 0, None)])
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize("what", ["work of another job", "another job", "the end of its job"])
def test_getting_ready_gives_way_to(
    mother: Mother, controller: FakeController, tmp_path: Path, what: str
) -> None:
    hangs = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    never = written(controller, tmp_path, f"{hangs}; time.sleep(600)")
    with agent(mother, controller, tmp_path):
        controller.give(order(never))
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        loading = int((tmp_path / "pid").read_text())
        match what:
            case "work of another job":
                controller.give(start(job="job_b"))
            case "another job":
                controller.give(order(written(controller, tmp_path), job="job_b"))
            case _:
                controller.give(wire.Release(job="job_a", generation=1))
        until(lambda: done(controller) == {1: None, 2: None})
        until(lambda: not is_alive(loading))
        if what == "another job":
            assert is_alive(importer(tmp_path))


def test_what_stands_by_goes_when_nobody_can_say_for_too_long_that_its_job_is_over(
    mother: Mother, tmp_path: Path
) -> None:
    controller = FakeController()
    controller.max_offline_seconds = 0.5
    with agent(mother, controller, tmp_path):
        with controller.serving():
            controller.give(order(written(controller, tmp_path)))
            until(lambda: done(controller) == {1: None})
            assert is_alive(importer(tmp_path))
        until(lambda: not is_alive(importer(tmp_path)))
    controller.close()


# ---- the store


@pytest.fixture
def told(told: Told) -> Told:
    """Job a runs on vm-1 and vm-2, and vm-3 is told to get ready."""
    told.numbers["vm-3"] = 0
    told.register("vm-3")
    told.plan()
    told.launch()
    spare = actions.SpareAt("vm-3", LIFE, 1)
    recorder = told.decide(actions.PrepareSpares("job_a", 2, (spare,), "vm-3 gets ready."))
    assert recorder.told == {("vm-3", LIFE)}
    return told


def preparation(told: Told) -> Preparation | None:
    (node,) = [node for node in told.world().nodes if node.name == "vm-3"]
    return node.preparation


def event_types(told: Told) -> list[str]:
    return [event.type for event in told.rows(tables.events) if event.node == "vm-3"]


def test_a_spare_is_told_and_what_becomes_of_it_is_known(told: Told) -> None:
    (standing,) = told.orders("vm-3")
    assert isinstance(standing.body, wire.Prepare) and standing.body.trainers == 1
    assert standing.body.program == told.spec("vm-1").program
    assert preparation(told) == Preparation("job_a")
    taken = told.report("vm-3", wire.OrderDone(number=standing.number, error="no room"))
    assert taken.decisive
    assert preparation(told) == Preparation("job_a", "no room", told.at)
    assert event_types(told) == ["node_joined", "order_failed"]


def test_a_spare_that_is_ready_is_news_only_while_it_is_one(told: Told) -> None:
    (standing,) = told.orders("vm-3")
    ready = wire.OrderDone(number=standing.number)
    told.end()
    told.plan(3)
    seats = tuple(actions.SeatAt(node, LIFE, 0) for node in ("vm-1", "vm-3"))
    told.decide(actions.Launch("job_a", 3, "train", SHAPE, (0, 8), seats, WEIGHTS, "launching"))
    assert preparation(told) is None
    told.report("vm-3", ready)
    assert event_types(told) == ["node_joined"]


def test_all_who_may_keep_something_warm_for_a_job_let_go_when_it_is_over(told: Told) -> None:
    told.register("vm-4")
    over = actions.MoveJob("job_a", JobState.CANCELLED, Reason.USER, "Cancelled.")
    end = actions.EndGeneration("job_a", 2, Reason.USER, False, "Cancelled.")
    recorder = told.decide(end, over)
    assert {name for name, _ in recorder.told} == {"vm-1", "vm-2", "vm-3"}
    release = wire.Release(job="job_a", generation=2, root="/c/job_a")
    assert [order.body for order in told.orders("vm-3")] == [release]
    for node in ("vm-1", "vm-2"):
        assert [order.body.kind for order in told.orders(node)] == ["stop", "release"]
    assert preparation(told) is None and told.orders("vm-4") == ()


def test_a_node_that_was_cut_off_when_its_job_ended_lets_go_when_it_is_back(told: Told) -> None:
    def back(job: str) -> tuple[str, ...]:
        asked = wire.Register(node="vm-4", incarnation=LIFE, facts=facts(), warm_for=job)
        told.store.write(lambda c: adoption.release_what_is_over(c, asked, told.at)).result()
        return tuple(order.body.kind for order in told.orders("vm-4"))

    told.register("vm-4")
    assert back("job_a") == () == back("job_nobody_knows")
    told.decide(actions.MoveJob("job_a", JobState.CANCELLED, Reason.USER, "Cancelled."))
    assert back("job_a") == ("release",)
