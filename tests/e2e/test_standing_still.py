"""What survivors hold is not lost; what is stopped on purpose stops after a common step."""

import pytest

from controller.api.schemas import JobView, RecoveryView
from controller.core.states import JobState
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FOUR = ("vm-1", "vm-2", "vm-3", "vm-4")


def two_by_two(scene: Scene) -> None:
    """It runs; the only checkpoint is that of step 0."""
    far_apart = {"dir": str(scene.cluster.folder / "ckpt"), "every": "100000 steps", "keep": 99}
    scene.add(*FOUR)
    until(lambda: len(scene.nodes()) == 4 or None, "four VMs")
    scene.submit(100_000, nodes="1..4", batch_size=128, plan={"depth": 2}, checkpoint=far_apart)
    scene.wait_for_step(25)
    assert str(scene.running().shape) == "2x2"


def kill_ranks(scene: Scene, *ranks: int) -> RecoveryView:
    running = scene.running()
    scene.kill(*(running.seats[rank].node for rank in ranks))
    return scene.wait_for_recovery(1)


def test_the_loss_of_one_vm_of_a_2x2_costs_no_step_however_old_the_checkpoint_is(
    scene: Scene,
) -> None:
    two_by_two(scene)
    recovery = kill_ranks(scene, 3)
    assert recovery.at_step >= 25
    assert (recovery.resumed_from, recovery.lost_steps) == (recovery.at_step, 0)
    assert recovery.phases.save
    assert "survivors saved step" in recovery.because
    scene.wait_for_step(recovery.at_step + 10)
    assert scene.ledger().samples_committed_once


def test_the_loss_of_both_replicas_of_a_stage_goes_on_from_disk_and_says_what_it_cost(
    scene: Scene,
) -> None:
    two_by_two(scene)
    recovery = kill_ranks(scene, 1, 3)
    assert recovery.resumed_from == 0
    assert recovery.lost_steps == recovery.at_step >= 25
    scene.wait_for_step(10)
    assert scene.ledger().samples_committed_once


def test_a_job_pauses_after_a_saved_step_and_goes_on_from_it(scene: Scene) -> None:
    two_by_two(scene)
    scene.act("pause")
    paused = scene.wait_for(JobState.PAUSED)
    assert paused.last_checkpoint_step == paused.step >= 25
    assert paused.nodes.used == 0
    scene.act("resume")
    scene.wait_for_step(paused.step + 5)
    link = scene.running().resumed_from
    assert link is not None and link.step == paused.step
    assert scene.ledger().samples_committed_once


def test_a_notice_is_answered_in_time_and_costs_no_step(scene: Scene) -> None:
    two_by_two(scene)
    victim = scene.node_of_rank(3)
    scene.cluster.fleet.notice(victim, 60)
    recovery = scene.wait_for_recovery(1)
    assert (recovery.resumed_from, recovery.lost_steps) == (recovery.at_step, 0)
    assert "was told to go; drained" in recovery.because
    assert victim not in {seat.node for seat in scene.running().seats}
    scene.kill(victim)
    scene.wait_for_step(recovery.at_step + 5)
    assert len(scene.recoveries()) == 1


def test_a_job_grows_when_nodes_come_and_joining_has_settled(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    until(lambda: len(scene.nodes()) == 2 or None, "two VMs")
    scene.submit(100_000, nodes="1..4", batch_size=128, plan={"depth": 2, "settle": "2s"})
    scene.wait_for_step(15)
    assert str(scene.running().shape) == "2x1"
    scene.add("vm-3", "vm-4")
    recovery = scene.wait_for_recovery(1)
    assert (recovery.from_shape, recovery.to_shape) == ("2x1", "2x2")
    assert recovery.lost_steps == 0
    assert scene.ledger().samples_committed_once


def test_a_step_is_saved_on_order_without_a_stop(scene: Scene) -> None:
    two_by_two(scene)
    before = scene.running().number
    scene.act("checkpoint")

    def saved() -> JobView | None:
        job = scene.job()
        return job if job.last_checkpoint_step else None

    job = until(saved, "a checkpoint")
    assert job.last_checkpoint_step and job.last_checkpoint_step >= 25
    assert scene.running().number == before


def test_a_deadline_shorter_than_a_step_saves_what_is_committed_and_says_what_is_aborted(
    scene: Scene,
) -> None:
    """Each step takes over a second; the VM goes at once."""
    far_apart = {"dir": str(scene.cluster.folder / "ckpt"), "every": "100000 steps", "keep": 99}
    scene.add(*FOUR)
    until(lambda: len(scene.nodes()) == 4 or None, "four VMs")
    scene.submit(100_000, nodes="1..4", batch_size=2048, plan={"depth": 2}, checkpoint=far_apart)
    scene.wait_for_step(2)
    victim = scene.node_of_rank(3)
    scene.cluster.fleet.notice(victim, 0)
    recovery = scene.wait_for_recovery(1)
    assert (recovery.resumed_from, recovery.lost_steps) == (recovery.at_step, 0)
    assert "too soon for another step: the one under way is aborted" in recovery.because
    assert victim not in {seat.node for seat in scene.running().seats}
    assert scene.ledger().samples_committed_once
