"""The controller is killed while a job runs: nobody stops training, and a new one takes it back."""

import pytest

from controller.core.states import JobState
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_killed_controller_stops_nobody_and_a_new_one_re_adopts_the_job(scene: Scene) -> None:
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(100_000, nodes="2..4")
    before = scene.wait_for_step(12)
    running = scene.running()
    trainers = {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)}

    scene.cluster.kill_controller()
    scene.cluster.start_controller()

    after = scene.job()
    assert after.state is JobState.RUNNING and after.generation == before.generation
    scene.wait_for_step(after.step + 5)
    assert scene.running().seats[0].incarnation == running.seats[0].incarnation
    assert {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)} == trainers
    assert not scene.recoveries()
    assert scene.ledger().samples_committed_once


def test_steps_made_while_the_controller_was_away_are_known_when_it_is_back(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    before = scene.wait_for_step(12)
    scene.cluster.kill_controller()
    folder = scene.cluster.folder / "ckpt" / scene.job_id
    until(
        lambda: any(f"step-{s:06d}" in p.name for p in folder.iterdir()
                    for s in range(before.step + 10, before.step + 40)) or None,
        "a checkpoint that was written without a controller",
    )  # fmt: skip
    scene.cluster.start_controller()
    scene.wait_for_step(before.step + 10)
    assert scene.ledger().samples_committed_once


def test_a_node_lost_while_the_controller_was_away_is_seen_when_it_is_back(scene: Scene) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(100_000, nodes="2..3")
    scene.wait_for_step(12)
    victim = scene.node_of_rank(1)
    scene.cluster.kill_controller()
    scene.kill(victim)
    scene.cluster.start_controller()
    recovery = scene.wait_for_recovery(1)
    assert victim not in {seat.node for seat in scene.running().seats}
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.ledger().samples_committed_once
