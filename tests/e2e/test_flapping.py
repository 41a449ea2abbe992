"""Neither a node that comes and goes nor one that is broken drags a job through restarts."""

import time

import pytest

from controller.api.schemas import EventView
from controller.core.events import EventType
from tests.e2e.scene import LEISURELY, PROGRAMS, Scene

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(600)]

ALIVE, STOPPED, TIMES = 8.0, 8.0, 11
"""Three minutes in all."""


@pytest.mark.parametrize("settle", ["60s", "1s"])
def test_a_node_that_comes_and_goes_costs_three_restarts_at_most(scene: Scene, settle: str) -> None:
    """With ``settle`` 1 s the job would grow onto it whenever it is back."""
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(1_000_000, nodes="2..4", plan={"settle": settle}, **LEISURELY)
    scene.wait_for_step(12)
    first, victim = scene.running(), scene.node_of_rank(1)
    step = first.committed
    for _ in range(TIMES):
        time.sleep(ALIVE)
        scene.stop(victim)
        time.sleep(STOPPED)
        scene.wake()
        assert scene.job().step >= step
        step = scene.job().step
    launched = [g for g in scene.generations() if g.launched_at and g.number > first.number]
    print([g.because for g in launched])
    assert len(launched) <= 3
    (node,) = [node for node in scene.nodes() if node.name == victim]
    assert node.quarantine is not None and f"{victim} was lost" in node.quarantine.because
    assert victim not in {seat.node for seat in scene.running().seats}
    scene.wait_for_step(step + 5)
    assert scene.ledger().samples_committed_once


def test_a_node_on_which_alone_the_program_fails_is_left_out(scene: Scene) -> None:
    """It is found before the program's own budget of failures is used up."""
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(
        1_000_000, nodes="2..3", program="picky.py", workdir=str(PROGRAMS),
        args={"not_on": "vm-2"}, plan={"depth": "2..3"},
    )  # fmt: skip
    scene.wait_for_step(10)
    assert "vm-2" not in {seat.node for seat in scene.running().seats}
    path, kind = "/api/v1/events", EventType.NODE_QUARANTINED.value
    events = scene.cluster.controller.all(path, EventView, type=kind)
    said = [event.message for event in events if event.node == "vm-2"]
    assert "failed 2 times in a row on vm-2 and on no other VM" in said[-1]
