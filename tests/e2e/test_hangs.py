"""What hangs though every agent answers is found, written down, named and left behind."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from controller.api.schemas import EventView, GenerationView, LogView, Page
from controller.client.rest import job_path
from controller.core.events import EventType
from controller.core.states import Reason
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).parents[1] / "fakes" / "programs"
BOUNDS = {"step": 6.0, "first_step": 40.0}


@contextmanager
def under(scene: Scene, **settings: str) -> Iterator[Scene]:
    """The controller has these settings of its own."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        scene.cluster.kill_controller()
        scene.cluster.start_controller()
    yield scene
    scene.cluster.kill_controller()
    scene.cluster.start_controller()


@pytest.fixture
def impatient(scene: Scene) -> Iterator[Scene]:
    """A step may take a few seconds only."""
    with under(scene, VARUNA_BOUNDS=json.dumps(BOUNDS)):
        yield scene


def hung(scene: Scene) -> GenerationView:
    """The generation that ended by a hang."""

    def look() -> GenerationView | None:
        found = [g for g in scene.generations() if g.end_reason is Reason.HANG]
        return found[0] if found else None

    return until(look, "a generation that ended by a hang")


def log_of(scene: Scene, generation: int, rank: int) -> str:
    path = job_path(scene.job_id, "/logs")
    view = scene.cluster.controller.get(path, LogView, rank=rank, generation=generation, tail=1000)
    return view.text


def test_a_layer_that_never_returns_is_found_dumped_named_and_left_behind(
    impatient: Scene, tmp_path: Path
) -> None:
    scene, trap = impatient, tmp_path / "trap"
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(
        100_000, nodes="4", program="hanging.py", workdir=str(PROGRAMS), plan={"depth": 2},
        args={"trap": str(trap)},
    )  # fmt: skip
    scene.wait_for_step(12)
    trap.touch()
    over = hung(scene)
    assert trap.with_suffix(".sprung").exists()
    recovery = scene.wait_for_recovery(1)
    scene.wait_for_step(recovery.at_step + 5)
    assert scene.ledger().samples_committed_once

    named = [seat for seat in over.seats if f"rank {seat.rank} on {seat.node} hangs" in said(scene)]
    assert len(named) == 1, said(scene)
    assert "in forward" in log_of(scene, over.number, named[0].rank)
    events = scene.cluster.controller.get(
        job_path(scene.job_id, "/events"), Page[EventView], type=EventType.STACKS_DUMPED.value
    )
    assert len(events.items) == 1


def said(scene: Scene) -> str:
    page = scene.cluster.controller.get(
        job_path(scene.job_id, "/events"), Page[EventView], type=EventType.GENERATION_ENDED.value
    )
    return " ".join(event.message for event in page.items)


@pytest.mark.soak
def test_a_trainer_that_is_stopped_while_its_agent_lives_is_found_and_named(
    impatient: Scene,
) -> None:
    scene = impatient
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(100_000, nodes="3..4")
    scene.wait_for_step(12)
    victim = scene.node_of_rank(1)
    (trainer,) = scene.trainers_of(victim)
    trainer.send_signal(signal.SIGSTOP)
    recovery = scene.wait_for_recovery(1)
    scene.wait_for_step(recovery.at_step + 5)
    assert f"on {victim} hangs" in said(scene)
    assert scene.ledger().samples_committed_once


@pytest.mark.soak
def test_an_agent_that_is_mute_while_its_job_goes_on_is_gone_without_at_an_agreed_step(
    scene: Scene,
) -> None:
    """Only the daemon is stopped: its trainer does its part, and nobody hears of it."""
    with under(scene, VARUNA_LOST_AFTER="2"):
        scene.add("vm-1", "vm-2", "vm-3", "vm-4")
        scene.submit(100_000, nodes="3..4")
        scene.wait_for_step(12)
        victim = scene.node_of_rank(1)
        agent = psutil.Process(scene.pid_of(victim))
        agent.send_signal(signal.SIGSTOP)
        scene.stopped.append(agent.pid)
        recovery = scene.wait_for_recovery(1)
        assert recovery.lost_steps == 0
        assert victim not in {seat.node for seat in scene.running().seats}
        scene.wait_for_step(recovery.at_step + 5)
        assert scene.ledger().samples_committed_once
        scene.clear()
