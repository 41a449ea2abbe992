"""Agents leave in any way and at any moment; the others go on."""

import os
import random
import signal
import time

import pytest

from controller.core.states import JobState
from tests.e2e.scene import LEISURELY, Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

NOTICES = 20
LONGEST_STEP = 1.0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_each_agent_in_turn_is_told_to_end_and_the_others_go_on(
    scene: Scene, how: signal.Signals
) -> None:
    """Also the one whose node serves the rendezvous."""
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(1_000_000, nodes="3..4", plan={"depth": "2..4"}, **LEISURELY)
    for rank in range(4):
        scene.wait_for(JobState.RUNNING)
        running = scene.running()
        scene.wait_for_step(running.committed + 3)
        victim = running.seats[rank % len(running.seats)].node
        os.kill(scene.pid_of(victim), how)
        recovery = scene.wait_for_recovery(rank + 1)
        assert victim not in {seat.node for seat in scene.running().seats}
        scene.wait_for_step(recovery.at_step + 2)
        scene.kill(victim)
        scene.add(f"vm-{rank + 5}")
    assert scene.ledger().samples_committed_once


def test_a_notice_at_20_random_moments_never_leaves_ranks_waiting_and_loses_no_step(
    scene: Scene,
) -> None:
    chance = random.Random(20)
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(1_000_000, nodes="3..4", plan={"depth": 2}, **LEISURELY)
    scene.wait_for_step(5)
    for turn in range(NOTICES):
        running = scene.running()
        time.sleep(chance.uniform(0, LONGEST_STEP))
        victim = chance.choice(running.seats).node
        scene.cluster.fleet.notice(victim, 30.0)
        recovery = scene.wait_for_recovery(turn + 1)
        assert recovery.lost_steps == 0, f"turn {turn}: {recovery.because}"
        until(
            lambda victim=victim: victim not in {s.node for s in scene.running().seats} or None,  # type: ignore[misc]
            f"{victim} to be empty",
        )
        scene.kill(victim)
        scene.add(f"vm-{turn + 5}")
    assert scene.ledger().samples_committed_once
