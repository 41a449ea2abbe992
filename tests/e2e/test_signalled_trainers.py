"""SIGTERM to one trainer alone, at any moment of a step. A trainer is told to go by its agent and
by nobody else, so that is a death like any other: nobody waits for it.
"""

import random
import time

import pytest

from tests.e2e.scene import LEISURELY, Scene

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "times", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_a_trainer_that_is_told_to_end_by_a_stranger_leaves_nobody_waiting_and_costs_no_step(
    scene: Scene, times: int
) -> None:
    chance = random.Random(20)
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(1_000_000, nodes="4", plan={"depth": 2}, **LEISURELY)
    scene.wait_for_step(2)
    assert str(scene.running().shape) == "2x2"
    last = ""
    for turn in range(times):
        running = scene.running()
        step = scene.wait_for_step(running.committed + 1)
        time.sleep(chance.uniform(0, step.step_time_seconds or 1.0))  # the phase of the step
        # Not twice in a row on one node: that would be taken for the node's fault.
        last = chance.choice([seat.node for seat in running.seats if seat.node != last])
        (trainer,) = scene.trainers_of(last)
        trainer.terminate()
        recovery = scene.wait_for_recovery(turn + 1)
        assert recovery.lost_steps == 0, f"turn {turn}: {recovery.because}"
        assert recovery.to_shape == "2x2", "a trainer's death is no reason to lose its node"
    assert scene.ledger().samples_committed_once
