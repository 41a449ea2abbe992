"""Nodes are lost in every way that one machine can show; the job goes on with the same training."""

import signal
import time

import psutil
import pytest

from controller.api.schemas import GenerationView
from controller.core.states import GenerationState, JobState
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FOUR = ("vm-1", "vm-2", "vm-3", "vm-4")
GAP_AT_MOST = 20.0
"""Far below any collective's timeout (30 minutes), far above what a busy machine needs: the bench
measures, this only tells waiting from recovering.
"""


def test_each_node_in_turn_is_killed_and_the_job_goes_on(scene: Scene) -> None:
    """Whichever rank dies, the first stage or the last, also the one whose node has the store."""
    scene.add(*FOUR)
    scene.submit(100_000, nodes="3..4")
    for rank in range(4):
        scene.wait_for(JobState.RUNNING)
        running = scene.running()
        scene.wait_for_step(running.committed + 12)
        victim = running.seats[rank % len(running.seats)].node
        scene.kill(victim)
        recovery = scene.wait_for_recovery(rank + 1)
        assert recovery.gap_s is not None and recovery.gap_s < GAP_AT_MOST
        assert victim not in {seat.node for seat in scene.running().seats}
        scene.add(victim)
    assert len(scene.recoveries()) == 4
    assert scene.ledger().samples_committed_once


def test_a_stopped_node_is_lost_after_its_silence(scene: Scene) -> None:
    scene.add(*FOUR)
    scene.submit(100_000, nodes="3..4")
    scene.wait_for_step(12)
    victim = scene.node_of_rank(1)
    scene.stop(victim)
    began = time.monotonic()
    recovery = scene.wait_for_recovery(1)
    assert time.monotonic() - began > 3.0, "a silent node was lost before its time"
    assert recovery.gap_s is not None and recovery.gap_s < GAP_AT_MOST
    assert victim not in {seat.node for seat in scene.running().seats}
    scene.wait_for_step(recovery.at_step + 5)


def test_a_stopped_node_that_wakes_up_is_told_that_its_work_is_void(scene: Scene) -> None:
    scene.add(*FOUR)
    scene.submit(100_000, nodes="3..4")
    scene.wait_for_step(12)
    victim = scene.node_of_rank(0)
    trainers = scene.trainers_of(victim)
    assert trainers
    scene.stop(victim)
    scene.wait_for_recovery(1)
    for pid in scene.stopped:
        psutil.Process(pid).send_signal(signal.SIGCONT)
    until(lambda: victim in {n.name for n in scene.nodes()} or None, "the node to be back")
    until(
        lambda: not any(process.is_running() for process in trainers) or None,
        "its old trainers to be gone",
    )
    assert scene.running().state is GenerationState.RUNNING
    assert scene.ledger().samples_committed_once


def test_four_losses_one_second_apart_make_one_generation_each_at_most(scene: Scene) -> None:
    names = [f"vm-{i}" for i in range(1, 9)]
    scene.add(*names)
    scene.submit(100_000, nodes="1..8", batch_size=32, plan={"depth": 4})
    scene.wait_for_step(12)
    before = scene.running()
    killed = [seat.node for seat in before.seats[:4]]
    assert len(killed) == 4
    for name in killed:
        scene.kill(name)
        time.sleep(1.0)  # the scenario: losses one second apart

    def without_the_killed() -> GenerationView | None:
        newest = scene.running()
        return None if {s.node for s in newest.seats} & set(killed) else newest

    after = until(without_the_killed, "a generation without the killed nodes")
    launched = [g for g in scene.generations() if g.number > before.number and g.launched_at]
    assert 1 <= len(launched) <= 4
    scene.wait_for_step(after.committed + 5)
    assert scene.ledger().samples_committed_once


def test_without_any_node_the_job_waits_and_goes_on_when_they_are_back(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2..4")
    scene.wait_for_step(12)
    scene.kill("vm-1", "vm-2")
    waiting = scene.wait_for(JobState.WAITING)
    assert "0 of at least 2" in waiting.message
    scene.add("vm-2", "vm-3")
    scene.wait_for(JobState.RUNNING)
    scene.wait_for_step(waiting.step + 5)
    assert scene.ledger().samples_committed_once


def test_a_killed_trainer_costs_no_node(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    scene.wait_for_step(12)
    before = {(seat.node, seat.incarnation) for seat in scene.running().seats}
    scene.trainers_of("vm-2")[-1].kill()
    recovery = scene.wait_for_recovery(1)
    assert recovery.from_shape == recovery.to_shape
    assert {(seat.node, seat.incarnation) for seat in scene.running().seats} == before


def test_nothing_is_alive_where_an_agent_was_killed(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    scene.wait_for_step(5)
    left = [scene.zygote_of("vm-2"), *scene.zygote_of("vm-2").children(recursive=True)]
    assert len(left) >= 3
    psutil.Process(scene.pid_of("vm-2")).kill()
    until(lambda: not any(p.is_running() for p in left) or None, "zygote and trainers to be gone")
