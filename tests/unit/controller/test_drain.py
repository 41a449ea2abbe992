"""Stories of wishes: pause and resume, notices, growing; all stop after a common step."""

import pytest

from controller.core.actions import Action, Launch, MarkNode, StandStill
from controller.core.states import GenerationState, JobState, NodeState, Reason
from controller.core.world import Job, Rules
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster


def running(nodes: int = 4, *, at_step: int = 25, submitted: Job | None = None) -> Cluster:
    """Two stages, twice where there are four VMs; the last checkpoint is that of step 20."""
    fields = {"nodes": "1..4", "plan": {"depth": 2}, "steps": 1000}
    cluster = Cluster(submitted or job(**fields), rules=Rules(settle=0.0), nodes=nodes)  # type: ignore[arg-type]
    cluster.step_seconds = 0.5
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    cluster.step(steps=at_step - cluster.generation().committed)
    cluster.settle()
    return cluster


def actions(cluster: Cluster, kind: type[Action]) -> list[Action]:
    """Of the next look, which is carried out."""
    return [a for decision in cluster.settle() for a in decision.actions if isinstance(a, kind)]


def launched(cluster: Cluster) -> Launch:
    """The next launch."""
    cluster.list_folder()
    cluster.pass_time(0.5)
    (launch,) = actions(cluster, Launch)
    assert isinstance(launch, Launch)
    return launch


def the_job(cluster: Cluster) -> Job:
    return cluster.jobs["job_a"]


# --- Pause and resume --------------------------------------------------------------------------


def test_a_pause_saves_the_step_that_all_stop_after_and_a_resume_goes_on_from_it() -> None:
    cluster = running()
    cluster.pause()
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.state is GenerationState.DRAINING
    assert the_job(cluster).state is JobState.RUNNING
    cluster.stop()
    cluster.settle()
    assert the_job(cluster).state is JobState.PAUSED
    assert the_job(cluster).message == "Paused by the user at step 26."
    assert {node.state for node in cluster.nodes.values()} == {NodeState.READY}
    cluster.pass_time(3600)
    cluster.settle()

    cluster.pause(wanted=False)
    cluster.settle()
    link = launched(cluster).resumed_from
    assert link is not None and link.step == 26


@pytest.mark.parametrize("moment", ["waiting", "planned", "launching"])
def test_a_pause_before_anything_runs_is_at_once(moment: str) -> None:
    cluster = Cluster(
        job(nodes="2..4"), rules=Rules(settle=0.0), nodes=0 if moment == "waiting" else 4
    )
    cluster.settle()
    if moment == "launching":
        cluster.list_folder()
        cluster.pass_time(0.5)
        cluster.settle()
    cluster.pause()
    cluster.settle()
    assert the_job(cluster).state is JobState.PAUSED
    assert the_job(cluster).current is None


def test_a_loss_while_draining_for_a_pause_is_salvaged_and_then_paused() -> None:
    cluster = running()
    cluster.pause()
    cluster.settle()
    cluster.kill("vm-3")
    cluster.settle()
    assert cluster.generation().state is GenerationState.HALTED
    cluster.survive()
    cluster.settle()
    assert the_job(cluster).state is JobState.PAUSED
    assert the_job(cluster).message == "Paused by the user at step 25."


def test_cancel_while_draining_or_paused() -> None:
    cluster = running()
    cluster.pause()
    cluster.settle()
    cluster.cancel()
    cluster.settle()
    assert the_job(cluster).state is JobState.CANCELLED


def test_a_drain_whose_save_fails_or_takes_too_long_halts_and_the_others_save() -> None:
    for late in (False, True):
        cluster = running()
        cluster.pause()
        cluster.settle()
        if late:
            cluster.pass_time(61)
        else:
            cluster.stop(save=False)
        (still,) = actions(cluster, StandStill)
        assert isinstance(still, StandStill) and still.state is GenerationState.HALTED
        cluster.survive()
        cluster.settle()
        cluster.survive()
        cluster.settle()
        assert the_job(cluster).state is JobState.PAUSED
        assert the_job(cluster).message == f"Paused by the user at step {25 if late else 26}."


# --- Notices -----------------------------------------------------------------------------------


def test_a_notice_drains_and_goes_on_without_the_node_that_leaves() -> None:
    cluster = running()
    cluster.notice("vm-3", 30)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.state is GenerationState.DRAINING
    assert cluster.nodes["vm-3"].state is NodeState.DRAINING
    cluster.stop()
    cluster.settle()
    message = the_job(cluster).message
    assert message == "vm-3 was told to go; drained at step 26; re-planning on 3 VMs."
    launch = launched(cluster)
    assert {seat.node for seat in launch.seats} <= {"vm-0", "vm-1", "vm-2"}
    assert launch.resumed_from is not None and launch.resumed_from.step == 26
    cluster.kill("vm-3")
    cluster.pass_time(5.5)
    gone = [m for m in actions(cluster, MarkNode) if isinstance(m, MarkNode) and m.state.is_gone]
    assert [(m.node, m.state) for m in gone] == [("vm-3", NodeState.EVICTED)]


def test_a_notice_too_short_for_a_step_and_a_save_halts_at_once() -> None:
    cluster = running()
    cluster.notice("vm-3", 2.2)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.state is GenerationState.HALTED
    cluster.survive()
    cluster.settle()
    cluster.survive()
    cluster.settle()
    link = launched(cluster).resumed_from
    assert link is not None and link.folder == "step-000025.g2.salvage"


def test_a_notice_to_a_spare_costs_nothing_and_one_that_lapses_is_forgotten() -> None:
    cluster = running(3)
    (spare,) = set(cluster.nodes) - {name for name, _ in cluster.generation().nodes}
    cluster.notice(spare, 30)
    assert not actions(cluster, StandStill)
    assert cluster.nodes[spare].state is NodeState.DRAINING
    cluster.pass_time(151)
    cluster.settle()
    assert cluster.nodes[spare].state is NodeState.READY


def test_a_launch_on_a_node_that_is_told_to_go_is_made_again_without_it() -> None:
    cluster = running()
    cluster.step_seconds = 0.0
    cluster.step()
    cluster.kill("vm-0")
    cluster.settle()
    assert {seat.node for seat in launched(cluster).seats} == {"vm-1", "vm-2"}
    cluster.notice("vm-1", 30)
    cluster.settle()
    assert {seat.node for seat in launched(cluster).seats} == {"vm-2", "vm-3"}


# --- Growing -----------------------------------------------------------------------------------


def test_a_running_job_grows_once_joining_has_settled_and_only_if_it_gains() -> None:
    cluster = running(2)
    cluster.join("vm-2")
    cluster.pass_time(61)
    cluster.step()
    assert not actions(cluster, StandStill), "a third VM is of no use to two stages"
    cluster.join("vm-3")
    cluster.pass_time(59)
    assert not actions(cluster, StandStill)
    cluster.pass_time(1.1)
    cluster.step()
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.reason is Reason.SCALE_UP
    cluster.stop()
    cluster.settle()
    assert str(launched(cluster).shape) == "2x2"
    cluster.pass_time(120)
    cluster.step()
    assert not actions(cluster, StandStill), "it has grown"


def could_grow() -> Cluster:
    """A job on two VMs could well use two more that are there."""
    cluster = running(2, submitted=job(plan={"depth": 2}))
    cluster.join("vm-2")
    cluster.join("vm-3")
    cluster.pass_time(61)
    cluster.step()
    return cluster


def test_a_job_whose_last_save_failed_does_not_stop_to_grow() -> None:
    cluster = could_grow()
    cluster.fail_to_save()
    cluster.step()
    assert not actions(cluster, StandStill), "what is not saved would be lost"
    cluster.save("job_a", cluster.generation().committed)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.reason is Reason.SCALE_UP


def test_a_job_does_not_stop_to_grow_while_one_of_its_vms_does_not_answer() -> None:
    """It could not be told, and what it writes would not be known."""
    cluster = could_grow()
    cluster.freeze("vm-1")
    cluster.pass_time(2.1)
    cluster.step()
    assert not actions(cluster, StandStill)
    cluster.thaw("vm-1")
    cluster.pass_time(1)
    cluster.step()
    assert actions(cluster, StandStill)


def test_a_job_whose_last_save_failed_does_not_stop_to_leave_a_slow_node() -> None:
    cluster = running(5, submitted=job(nodes="1..5", plan={"depth": 2}, steps=10_000))
    cluster.step_seconds = 0.5
    cluster.step()
    cluster.pace(1.0, 1.0, 1.0, 1.6)
    cluster.fail_to_save()
    assert not actions(cluster, StandStill)
    cluster.save("job_a", cluster.generation().committed)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.reason is Reason.STRAGGLER


def test_a_job_whose_last_save_failed_stops_all_the_same_when_it_must() -> None:
    cluster = could_grow()
    cluster.fail_to_save()
    cluster.notice("vm-1", 60)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.reason is Reason.EVICTION


def test_a_job_at_its_most_or_near_its_end_does_not_grow() -> None:
    for submitted in (job(nodes="1..2", plan={"depth": 2}), job(steps=26, plan={"depth": 2})):
        cluster = running(2, submitted=submitted)
        cluster.join("vm-2")
        cluster.join("vm-3")
        cluster.pass_time(61)
        assert not actions(cluster, StandStill)


def test_a_waiting_job_has_the_free_nodes_before_another_grows() -> None:
    cluster = running(2)
    cluster.jobs["job_b"] = job("b", nodes="2", submitted_at=1.0)
    cluster.settle()
    cluster.join("vm-2")
    cluster.join("vm-3")
    cluster.settle()
    cluster.pass_time(61)
    assert not actions(cluster, StandStill)


def test_a_job_does_not_grow_onto_a_vm_that_was_lost_just_now() -> None:
    cluster = running(2, submitted=job(plan={"depth": 2, "settle": "1s"}))
    cluster.join("vm-2")
    cluster.join("vm-3")
    cluster.join("vm-3")  # started again: what it was is lost
    cluster.pass_time(60)
    cluster.step()
    assert not actions(cluster, StandStill)
    cluster.pass_time(1)
    cluster.step()
    assert actions(cluster, StandStill)
