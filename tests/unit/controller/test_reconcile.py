"""Stories of jobs on nodes that come and go: what is decided, and what is said."""

from dataclasses import replace

import pytest

from controller.core.actions import EndGeneration, Launch, MarkDone, MoveJob, PlanGeneration
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState, Reason
from controller.core.words import times
from controller.core.world import Job, Rules
from tests.unit.controller.builders import costs_of, job
from tests.unit.controller.cluster import Cluster
from trainer.contract.progress import ExitCode


def running(
    nodes: int = 8, *, at_step: int = 25, submitted: Job | None = None, devices: int = 1
) -> Cluster:
    """A job that runs on ``nodes``, with checkpoints at every tenth step."""
    cluster = Cluster(submitted or job(), rules=Rules(settle=0.0))
    for i in range(nodes):
        cluster.join(f"vm-{i}", devices=devices)
    start(cluster)
    cluster.step(steps=at_step - 1)
    cluster.settle()
    cluster.pass_time(1)
    return cluster


def start(cluster: Cluster, job_id: str = "job_a") -> None:
    """From submission to the first step after the first weights."""
    for _ in range(8):
        cluster.settle()
        cluster.pass_time(0.5)
        if cluster.jobs[job_id].state is JobState.RUNNING:
            return
        cluster.work(job_id)
    raise AssertionError(f"does not run: {cluster.jobs[job_id]}")


def recover(cluster: Cluster) -> None:
    """From planned to the first new step."""
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    cluster.step()
    cluster.settle()


def the_job(cluster: Cluster) -> Job:
    return cluster.jobs["job_a"]


def resumed(cluster: Cluster) -> str:
    """The folder that the current generation loads."""
    link = cluster.generation().resumed_from
    return link.folder if link else ""


def ends(cluster: Cluster) -> list[EndGeneration]:
    """What this look would end."""
    found = reconcile(cluster.world, cluster.now, cluster.rules)
    return [a for d in found for a in d.actions if isinstance(a, EndGeneration)]


# --- Starting ----------------------------------------------------------------------------------


def test_a_job_waits_with_a_sentence_until_there_are_enough_vms() -> None:
    cluster = Cluster(job(nodes="2..8"), nodes=1)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING
    assert the_job(cluster).reason is Reason.TOO_FEW_NODES
    assert the_job(cluster).message == "Waiting for VMs: 1 of at least 2 ready."

    cluster.join("vm-1")
    cluster.settle()
    assert the_job(cluster).state is JobState.STARTING
    assert the_job(cluster).message == "Planning on 2 VMs."


def test_the_first_weights_are_built_and_links_measured_before_anything_is_planned() -> None:
    cluster = Cluster(job(), nodes=8)
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    first = cluster.generation()
    assert (first.number, first.kind, len(first.seats)) == (1, "first_weights", 4)
    assert len({seat.node for seat in first.seats}) == 4

    cluster.work()
    cluster.settle()
    assert cluster.generation().state is GenerationState.PLANNED
    assert cluster.generation().number == 2


def test_every_launch_loads_a_checkpoint_the_first_too() -> None:
    cluster = running(8, at_step=1)
    resumed = cluster.generation().resumed_from
    assert resumed is not None
    assert (resumed.step, resumed.generation, resumed.folder) == (0, 1, "step-000000.g1")
    assert the_job(cluster).state is JobState.RUNNING


def test_a_start_waits_for_vms_that_are_just_joining() -> None:
    cluster = Cluster(job(nodes="2..", costs=costs_of(6)), nodes=2)
    cluster.settle()
    cluster.list_folder()
    for name in ("vm-2", "vm-3"):
        cluster.pass_time(0.9)
        cluster.join(name)
        cluster.settle()
        assert cluster.generation().state is GenerationState.PLANNED
    cluster.pass_time(1.0)
    cluster.settle()
    assert cluster.generation().state is GenerationState.LAUNCHING


def test_a_start_does_not_wait_for_ever_for_vms_that_trickle_in() -> None:
    cluster = Cluster(job(nodes="2..", costs=costs_of(6)), nodes=2)
    for i in range(2, 9):
        cluster.settle()
        if cluster.generation().state is GenerationState.PLANNED:
            cluster.list_folder()
        cluster.pass_time(0.9)
        cluster.join(f"vm-{i}")
    cluster.settle()
    assert cluster.generation().state is GenerationState.LAUNCHING


def test_nodes_max_bounds_the_vms_that_are_used() -> None:
    cluster = running(8, submitted=job(nodes="2..4"))
    assert len(cluster.generation().nodes) <= 4


def test_vms_with_several_devices_hold_neighbouring_ranks() -> None:
    cluster = running(2, submitted=job(plan={"depth": 4}), devices=4)
    seats = cluster.generation().seats
    assert [seat.node for seat in seats] == ["vm-0"] * 4 + ["vm-1"] * 4


def test_devices_per_node_bounds_what_is_used_of_a_vm() -> None:
    cluster = running(2, submitted=job(devices_per_node=1), devices=4)
    assert {seat.device for seat in cluster.generation().seats} == {0}


def test_vms_of_the_wrong_kind_do_not_count() -> None:
    cluster = Cluster(job(device="cuda"), nodes=8)
    cluster.join("gpu-0", kind="cuda")
    cluster.settle()
    assert the_job(cluster).message == "Waiting for VMs: 1 of at least 2 ready."


def test_more_stages_than_layers_is_no_plan_fits_from_the_first_inspection() -> None:
    cluster = Cluster(job(plan={"depth": 9}), nodes=8)
    for _ in range(4):
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.NO_PLAN_FITS
    assert "6 layers" in the_job(cluster).message


def test_more_stages_than_devices_waits_and_starts_when_they_come() -> None:
    cluster = Cluster(job(plan={"depth": 5}, costs=costs_of(6)), nodes=4)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING
    assert the_job(cluster).reason is Reason.NO_PLAN_FITS
    cluster.join("vm-4")
    cluster.settle()
    assert the_job(cluster).state is JobState.STARTING


def test_a_job_that_waits_for_too_long_fails_with_the_reason() -> None:
    cluster = Cluster(job(recovery={"max_wait": "10m"}), nodes=1)
    cluster.settle()
    cluster.pass_time(600)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING
    cluster.pass_time(1)
    cluster.settle()
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).message.endswith("Given up after 10 m.")


# --- Losing VMs --------------------------------------------------------------------------------


def test_three_of_eight_lost_is_one_replan_with_cause_action_and_cost() -> None:
    cluster = running(8, submitted=job(plan={"depth": "4..8"}), at_step=25)
    before = cluster.generation().shape
    cluster.kill("vm-1", "vm-2", "vm-5")
    cluster.settle()
    assert the_job(cluster).state is JobState.RECOVERING
    assert the_job(cluster).reason is Reason.NODE_LOST
    assert the_job(cluster).message == "3 of 8 VMs lost; re-planning on 5 VMs."

    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    launched = cluster.generation()
    assert launched.number == 3
    plan = f"re-planned {times(before)} → {times(launched.shape)}"
    assert launched.because.startswith(f"3 of 8 VMs lost; {plan}")
    assert launched.because.endswith("; resuming from step 20 (5 steps to redo).")
    assert not {"vm-1", "vm-2", "vm-5"} & {seat.node for seat in launched.seats}

    cluster.step()
    cluster.settle()
    assert the_job(cluster).state is JobState.RUNNING


def test_a_spare_takes_the_lost_seat_and_the_shape_stays() -> None:
    cluster = running(5, submitted=job(plan={"depth": 2}, nodes="2.."))
    assert str(cluster.generation().shape) == "2x2"
    cluster.kill("vm-0")
    cluster.settle()
    recover(cluster)
    assert str(cluster.generation().shape) == "2x2"
    assert {"vm-4"} < {seat.node for seat in cluster.generation().seats}
    assert "1 of 4 VMs lost; keeping 2×2; resuming from step 20" in " ".join(cluster.told)


def test_a_launch_waits_until_losses_have_settled() -> None:
    cluster = running(8)
    cluster.kill("vm-1")
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.29)
    assert cluster.settle() == ()
    cluster.pass_time(0.01)
    assert cluster.settle()
    assert cluster.generation().state is GenerationState.LAUNCHING


def test_a_loss_while_launching_makes_the_next_generation_at_once() -> None:
    cluster = running(8)
    cluster.kill("vm-1")
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    assert cluster.generation().state is GenerationState.LAUNCHING

    cluster.kill("vm-2")
    cluster.settle()
    assert (cluster.generation().number, cluster.generation().state) == (
        4,
        GenerationState.PLANNED,
    )
    assert the_job(cluster).message == "2 of 8 VMs lost; re-planning on 6 VMs."


def test_a_loss_while_planned_takes_no_new_number_unless_the_looker_is_lost() -> None:
    cluster = running(8)
    cluster.kill("vm-1")
    cluster.settle()
    looker = cluster.generation().look_node
    other = next(n for n in ("vm-2", "vm-3") if n != looker)
    cluster.kill(other)
    cluster.pass_time(6)
    cluster.settle()
    assert cluster.generation().number == 3
    cluster.kill(str(looker))
    cluster.settle()
    assert cluster.generation().number == 4
    cluster.list_folder()
    cluster.kill(str(cluster.generation().look_node))
    cluster.pass_time(6)
    cluster.settle()
    assert cluster.generation().number == 4, "it has said what it was asked for"


def test_four_losses_a_second_apart_make_a_generation_each_at_most() -> None:
    cluster = running(8)
    for i in range(4):
        cluster.kill(f"vm-{i}")
        cluster.settle()
        cluster.list_folder()
        cluster.pass_time(1)
        cluster.settle()
    assert cluster.generation().number <= 2 + 4
    assert cluster.generation().state is GenerationState.LAUNCHING
    cluster.step()
    cluster.settle()
    assert the_job(cluster).state is JobState.RUNNING
    assert len(cluster.generation().nodes) <= 4


def test_vms_that_died_together_are_marked_though_one_of_them_ended_the_generation() -> None:
    cluster = running(8)
    for seat in cluster.generation().seats[:2]:
        cluster.break_requests(seat.node)
        cluster.mute.add(seat.incarnation)
    first, second = (seat.node for seat in cluster.generation().seats[:2])
    cluster.halt("job_a", 3, 0)
    cluster.settle()
    assert first not in cluster.nodes and second in cluster.nodes
    cluster.pass_time(1.6)
    cluster.settle()
    assert second not in cluster.nodes


def test_all_lost_waits_with_a_sentence_and_resumes_by_itself() -> None:
    cluster = running(4)
    cluster.freeze(*cluster.nodes)
    cluster.break_requests(*cluster.nodes)
    cluster.pass_time(5.1)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING
    assert the_job(cluster).reason is Reason.TOO_FEW_NODES
    assert "waiting for VMs: 0 of at least 2 ready" in the_job(cluster).message

    for i in range(4):
        cluster.join(f"vm-{i}")
    cluster.settle()
    assert the_job(cluster).state is JobState.STARTING
    recover(cluster)
    assert the_job(cluster).state is JobState.RUNNING
    assert resumed(cluster) == "step-000020.g2"


def test_below_min_fails_when_the_job_says_so() -> None:
    cluster = running(4, submitted=job(nodes="4", recovery={"below_min": "fail"}))
    cluster.kill("vm-0")
    cluster.settle()
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).message == "1 of 4 VMs lost; waiting for VMs: 3 of at least 4 ready."


def test_nodes_that_were_only_cut_off_are_taken_back_with_their_running_generation() -> None:
    cluster = running(4)
    number = cluster.generation().number
    cluster.freeze(*cluster.nodes)
    cluster.pass_time(60)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING

    cluster.thaw(*cluster.nodes)
    cluster.pass_time(1)
    cluster.settle()
    assert the_job(cluster).state is JobState.RUNNING
    assert cluster.generation().number == number


def test_a_job_that_was_only_cut_off_may_come_back_succeeded() -> None:
    cluster = running(4, submitted=job(steps=30))
    cluster.freeze(*cluster.nodes)
    cluster.pass_time(60)
    cluster.settle()
    cluster.thaw(*cluster.nodes)
    cluster.step(steps=5)
    cluster.settle()
    assert the_job(cluster).state is JobState.SUCCEEDED


@pytest.mark.parametrize(("cut_off", "state"), [(4, JobState.WAITING), (3, JobState.FAILED)])
def test_silence_of_all_may_be_our_own_network_and_fails_no_job(
    cut_off: int, state: JobState
) -> None:
    cluster = running(4, submitted=job(nodes="4", recovery={"below_min": "fail"}))
    cluster.freeze(*list(cluster.nodes)[:cut_off])
    cluster.pass_time(5.1)
    cluster.settle()
    assert the_job(cluster).state is state


def test_a_returned_vm_is_a_new_incarnation_and_its_old_seat_is_lost() -> None:
    cluster = running(4)
    cluster.join(cluster.generation().seats[0].node)
    cluster.settle()
    assert the_job(cluster).state is JobState.RECOVERING
    recover(cluster)
    assert len(cluster.generation().nodes) == 4


def test_a_running_job_stays_when_vms_join_and_says_so() -> None:
    cluster = running(4)
    number = cluster.generation().number
    cluster.join("vm-8")
    cluster.settle()
    assert cluster.generation().number == number
    assert the_job(cluster).message.endswith("; 1 more VM ready, used at the next re-plan.")


def relaunch(cluster: Cluster) -> float:
    """Seconds until the next launch (or the job's end)."""
    began = cluster.now
    for _ in range(200):
        cluster.settle()
        current = the_job(cluster).current
        if the_job(cluster).state.is_over or (current and current.is_launched):
            return cluster.now - began
        if current:
            cluster.list_folder()
        cluster.pass_time(0.5)
    raise AssertionError("is not launched")


def test_evictions_are_never_charged_but_a_job_that_kills_its_vms_is_stopped() -> None:
    cluster = running(8, submitted=job(nodes="1..8", recovery={"max_restarts": 0}))
    pauses = []
    for evicted in range(20):
        assert not the_job(cluster).state.is_over
        cluster.kill(cluster.generation().seats[0].node)
        cluster.join(f"vm-{8 + evicted}")
        pauses.append(relaunch(cluster))
    assert pauses[:3] == [0.5, 0.5, 0.5]
    assert pauses[-2] >= 60
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.RESTART_BUDGET
    assert the_job(cluster).message == (
        "Given up: 20 launches in a row lost a VM before a new step."
    )


# --- Faults ------------------------------------------------------------------------------------


def test_a_program_error_is_charged_and_tried_again_after_a_pause() -> None:
    cluster = running(4)
    cluster.fail(1, ExitCode.PROGRAM_ERROR, "ValueError: no such file (gpt.py:12)")
    cluster.settle()
    assert the_job(cluster).state is JobState.RECOVERING
    assert the_job(cluster).reason is Reason.PROGRAM_ERROR
    node = the_job(cluster).past[-1].nodes[1][0]
    assert the_job(cluster).message == (
        f"Rank 1 on {node}: ValueError: no such file (gpt.py:12). Attempt 2 of 4 follows in 1 s."
    )
    assert the_job(cluster).current is None
    cluster.pass_time(1)
    cluster.settle()
    assert cluster.generation().state is GenerationState.PLANNED


@pytest.mark.parametrize(("max_restarts", "attempts"), [(0, 1), (1, 2), (3, 4)])
def test_a_program_that_never_gets_going_stops_after_its_restarts(
    max_restarts: int, attempts: int
) -> None:
    cluster = Cluster(job(recovery={"max_restarts": max_restarts}), nodes=4)
    tries = 0
    for _ in range(200):
        cluster.settle()
        if the_job(cluster).state.is_over:
            break
        cluster.pass_time(1)
        if the_job(cluster).current is None:
            continue
        if cluster.generation().state is GenerationState.PLANNED:
            cluster.list_folder()
        elif not cluster.generation().seats[0].exit:
            cluster.exit(0, code=1, log_tail="Traceback\nImportError: no module named nowhere\n")
            tries += 1
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.PROGRAM_ERROR
    assert tries == attempts
    assert "ImportError: no module named nowhere" in the_job(cluster).message


def test_pauses_double_and_progress_resets_them() -> None:
    cluster = running(4, submitted=job(recovery={"max_restarts": 9}))
    for pause, how in (("1 s", "one way"), ("2 s", "another"), ("4 s", "a third")):
        cluster.fail(0, ExitCode.PROGRAM_ERROR, how)
        cluster.pass_time(0.3)
        cluster.settle()
        assert the_job(cluster).message.endswith(f"follows in {pause}.")
        cluster.pass_time(4)
        cluster.settle()
        cluster.list_folder()
        cluster.settle()
    cluster.step(steps=10)
    cluster.settle()
    cluster.fail(0, ExitCode.PROGRAM_ERROR)
    cluster.settle()
    assert the_job(cluster).message.endswith("follows in 1 s.")


def test_the_same_failure_at_the_same_step_goes_further_back_then_stops() -> None:
    cluster = running(4, at_step=25)
    loaded = [resumed(cluster)]
    while not the_job(cluster).state.is_over:
        cluster.fail(0, ExitCode.PROGRAM_ERROR)
        relaunch(cluster)
        if the_job(cluster).current:
            loaded.append(resumed(cluster))
            link = cluster.generation().resumed_from
            cluster.step(steps=25 - (link.step if link else 0), save_every=1000)
    assert loaded == ["step-000000.g1", "step-000020.g2", "step-000010.g2"]
    assert the_job(cluster).state is JobState.FAILED
    assert "The same 3 times at step 26" in the_job(cluster).message


def test_a_signal_is_the_programs_doing_when_its_agent_lives_on() -> None:
    cluster = running(4)
    cluster.exit(2, signal=9)
    assert ends(cluster) == []
    cluster.pass_time(0.3)
    (end,) = ends(cluster)
    assert end.charged
    assert "was killed by signal 9 (out of memory?)" in end.because


def test_a_signal_just_before_its_vm_is_lost_is_not_charged() -> None:
    cluster = running(4)
    seat = cluster.generation().seats[2]
    cluster.exit(2, signal=9)
    cluster.break_requests(seat.node)
    cluster.freeze(seat.node)
    cluster.pass_time(1.0)
    assert ends(cluster) == []
    cluster.pass_time(4.1)
    (end,) = ends(cluster)
    assert (end.reason, end.charged) == (Reason.NODE_LOST, False)


def test_leaving_early_with_code_0_is_the_programs_error() -> None:
    cluster = running(4)
    cluster.exit(1, code=0, log_tail="bye\n")
    cluster.pass_time(0.3)
    (end,) = ends(cluster)
    assert end.charged and "exited with code 0: bye" in end.because


def test_a_damaged_checkpoint_is_condemned_and_the_one_before_is_taken() -> None:
    cluster = running(4, at_step=25)
    cluster.kill("vm-0")
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    assert resumed(cluster) == "step-000020.g2"

    cluster.fail(0, ExitCode.CHECKPOINT_DAMAGED, "layer-003.r2.safetensors has another content")
    cluster.settle()
    assert the_job(cluster).reason is Reason.CHECKPOINT_DAMAGED
    recover(cluster)
    assert resumed(cluster) == "step-000010.g2"
    assert not the_job(cluster).past[-1].charged


def test_when_every_checkpoint_is_damaged_the_job_fails_and_says_so() -> None:
    cluster = running(4, at_step=5)
    cluster.kill("vm-0")
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    cluster.fail(0, ExitCode.CHECKPOINT_DAMAGED)
    cluster.settle()
    cluster.list_folder()
    cluster.settle()
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).message == "No complete checkpoint is left to go on from."


def test_a_vm_that_has_not_mounted_the_folder_does_not_end_the_job() -> None:
    cluster = running(4)
    kept = the_job(cluster).checkpoints
    cluster.kill("vm-0")
    cluster.settle()
    first = cluster.generation().look_node
    cluster.jobs["job_a"] = replace(
        the_job(cluster), checkpoints=tuple(replace(c, complete=False) for c in kept)
    )
    cluster.list_folder()
    cluster.pass_time(1)
    cluster.settle()
    assert the_job(cluster).reason is Reason.CHECKPOINT_UNREACHABLE
    assert f"{first} sees no complete checkpoint" in the_job(cluster).message
    cluster.pass_time(30)
    cluster.settle()
    assert cluster.generation().look_node != first

    cluster.jobs["job_a"] = replace(the_job(cluster), checkpoints=kept)
    recover(cluster)
    assert resumed(cluster) == "step-000020.g2"


def test_an_unreachable_folder_is_tried_again_with_pauses_and_another_node() -> None:
    cluster = running(4)
    cluster.unreachable = "permission denied"
    cluster.kill("vm-0")
    cluster.settle()
    lookers = []
    for _ in range(10):
        if the_job(cluster).current:
            lookers.append(cluster.generation().look_node)
            cluster.list_folder()
            cluster.settle()
            assert the_job(cluster).reason is Reason.CHECKPOINT_UNREACHABLE
            assert "cannot list the checkpoint folder: permission denied" in (
                the_job(cluster).message
            )
        cluster.pass_time(30)
        cluster.settle()
    assert len(set(lookers)) == 3
    assert not the_job(cluster).state.is_over

    cluster.unreachable = ""
    relaunch(cluster)
    cluster.step()
    cluster.settle()
    assert the_job(cluster).state is JobState.RUNNING


def test_a_folder_that_was_never_reached_is_given_up() -> None:
    cluster = Cluster(job(), nodes=4)
    cluster.unreachable = "no such device"
    for _ in range(60):
        cluster.settle()
        if the_job(cluster).current:
            cluster.list_folder()
        cluster.pass_time(10)
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.CHECKPOINT_UNREACHABLE


def test_a_listing_that_does_not_come_is_asked_of_another_node() -> None:
    cluster = Cluster(job(), nodes=4)
    cluster.settle()
    first = cluster.generation().look_node
    cluster.pass_time(10.1)
    cluster.settle()
    assert the_job(cluster).reason is Reason.CHECKPOINT_UNREACHABLE
    cluster.pass_time(1)
    cluster.settle()
    assert cluster.generation().look_node != first


def test_a_marker_above_ours_makes_the_next_number_higher_still() -> None:
    cluster = Cluster(job(), nodes=4)
    cluster.stranger = 12
    cluster.settle()
    cluster.list_folder()
    cluster.settle()
    assert cluster.generation().number == 13


def test_a_stale_rank_leads_to_a_new_number() -> None:
    cluster = running(4)
    number = cluster.generation().number
    cluster.fail(0, ExitCode.STALE)
    cluster.settle()
    assert cluster.generation().number == number + 1
    assert not the_job(cluster).past[-1].charged


def test_launches_that_come_to_nothing_are_bounded() -> None:
    cluster = running(4)
    cluster.kill("vm-0")
    for _ in range(100):
        cluster.settle()
        if the_job(cluster).state.is_over:
            break
        if the_job(cluster).current and cluster.generation().state is GenerationState.PLANNED:
            cluster.list_folder()
        cluster.pass_time(61)
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.RESTART_BUDGET
    assert "6 launches in a row came to nothing" in the_job(cluster).message


def test_a_broken_link_between_healthy_vms_launches_all_again() -> None:
    cluster = running(4)
    cluster.halt("job_a", 0, 1)
    cluster.halt("job_a", 1, 0)
    cluster.pass_time(1.9)
    assert ends(cluster) == []
    cluster.pass_time(0.1)
    (end,) = ends(cluster)
    assert (end.reason, end.charged) == (Reason.BAD_PATH_BETWEEN_NODES, False)


# --- Ending ------------------------------------------------------------------------------------


def test_a_complete_final_checkpoint_in_the_lineage_is_success() -> None:
    cluster = running(4, submitted=job(steps=30))
    cluster.step(steps=5)
    cluster.settle()
    assert the_job(cluster).state is JobState.SUCCEEDED
    assert the_job(cluster).message == "Done: 30 steps."
    (done,) = cluster.done
    assert (done.step, done.folder) == (30, "step-000030.g2")


def test_a_loss_after_the_final_checkpoint_is_still_success() -> None:
    cluster = running(4, submitted=job(steps=30))
    cluster.step(steps=5)
    cluster.kill("vm-0")
    cluster.settle()
    assert the_job(cluster).state is JobState.SUCCEEDED


def test_a_final_checkpoint_that_only_the_listing_knows_is_success() -> None:
    cluster = running(4, submitted=job(steps=30))
    cluster.step(steps=4)
    cluster.kill("vm-0")
    cluster.settle()
    cluster.find(30, generation=2)
    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    assert the_job(cluster).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "moment", ["waiting", "planned", "first weights", "running", "recovering", "pausing"]
)
def test_cancel_wins_at_any_moment_and_nothing_starts_again(moment: str) -> None:
    cluster = Cluster(job(), nodes=1 if moment == "waiting" else 4)
    if moment in ("running", "recovering", "pausing"):
        cluster = running(4)
    if moment == "recovering":
        cluster.kill("vm-0")
    if moment == "pausing":
        cluster.fail(0, ExitCode.PROGRAM_ERROR)
    cluster.settle()
    if moment == "first weights":
        cluster.list_folder()
        cluster.settle()

    cluster.cancel()
    cluster.settle()
    assert the_job(cluster).state is JobState.CANCELLED
    assert the_job(cluster).current is None
    for _ in range(5):
        cluster.pass_time(1)
        assert cluster.settle() == ()


# --- Checkpoints -------------------------------------------------------------------------------


def test_the_newest_three_complete_checkpoints_are_kept() -> None:
    cluster = running(4, at_step=25)
    assert [c.folder for c in the_job(cluster).checkpoints if c.condemned] == []
    cluster.step(steps=5)
    cluster.settle()
    gone = [c.folder for c in the_job(cluster).checkpoints if c.condemned]
    assert gone == ["step-000000.g1"]


def test_nothing_is_deleted_for_an_incomplete_one() -> None:
    cluster = running(4, at_step=25)
    cluster.save("job_a", 25, complete=False)
    assert cluster.settle() == ()


def test_deletions_leave_nothing_old_behind_but_what_may_still_be_written() -> None:
    cluster = running(4, at_step=25)
    cluster.save("job_a", 5, complete=False)
    cluster.find(7, generation=1, complete=False)
    cluster.step(steps=15)
    cluster.settle()
    gone = {c.folder for c in the_job(cluster).checkpoints if c.condemned}
    assert gone == {"step-000000.g1", "step-000007.g1", "step-000010.g2"}


def test_what_a_voided_generation_still_writes_is_never_loaded() -> None:
    cluster = running(4, at_step=25)
    cluster.kill("vm-0")
    cluster.settle()
    recover(cluster)
    assert cluster.generation().committed == 21
    cluster.find(30, generation=2)
    cluster.kill("vm-1")
    cluster.settle()
    recover(cluster)
    assert resumed(cluster) == "step-000020.g2"


def test_a_generation_that_committed_nothing_voids_nothing() -> None:
    cluster = running(4, at_step=25)
    for name in ("vm-0", "vm-1"):
        cluster.kill(name)
        cluster.settle()
        cluster.list_folder()
        cluster.pass_time(0.3)
        if name == "vm-1":
            cluster.find(25, generation=2)
        cluster.settle()
    assert resumed(cluster) == "step-000025.g2"


# --- Several jobs ------------------------------------------------------------------------------


def test_free_vms_go_to_the_higher_priority_then_to_the_older_job() -> None:
    old, young = job("a", nodes="2..4"), job("b", nodes="2..4", submitted_at=5.0)
    urgent = job("c", nodes="2..4", submitted_at=9.0, priority=1)
    cluster = Cluster(young, old, urgent, nodes=8)
    cluster.settle()
    states = {name: found.state for name, found in cluster.jobs.items()}
    assert states == {
        "job_a": JobState.STARTING,
        "job_b": JobState.WAITING,
        "job_c": JobState.STARTING,
    }


def test_a_recovering_job_keeps_what_is_left_though_another_waits() -> None:
    cluster = running(4, submitted=job(nodes="2..4"))
    waiting = job("b", nodes="2..4", priority=9, submitted_at=1.0)
    cluster.jobs["job_b"] = waiting
    cluster.settle()
    assert cluster.jobs["job_b"].state is JobState.WAITING
    cluster.kill("vm-0")
    cluster.settle()
    recover(cluster)
    assert the_job(cluster).state is JobState.RUNNING
    assert cluster.jobs["job_b"].state is JobState.WAITING


def test_a_job_that_pauses_between_two_tries_keeps_its_vms() -> None:
    cluster = running(4, submitted=job(nodes="2..4"))
    cluster.jobs["job_b"] = job("b", nodes="2..4", priority=9, submitted_at=1.0)
    cluster.settle()
    cluster.fail(0, ExitCode.PROGRAM_ERROR)
    cluster.settle()
    assert the_job(cluster).state is JobState.RECOVERING
    assert cluster.jobs["job_b"].state is JobState.WAITING


def test_a_job_that_builds_its_first_weights_keeps_the_vms_it_will_use() -> None:
    cluster = Cluster(job(nodes="2..4"), nodes=4)
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    assert cluster.generation().kind == "first_weights"
    cluster.jobs["job_b"] = job("b", nodes="1..4", submitted_at=1.0)
    cluster.settle()
    assert cluster.jobs["job_b"].state is JobState.WAITING


def test_what_a_finished_job_gives_back_is_used_in_the_same_look() -> None:
    cluster = running(4, submitted=job(nodes="2..4"))
    cluster.jobs["job_b"] = job("b", nodes="2..4", submitted_at=1.0)
    cluster.settle()
    cluster.cancel()
    decisions = cluster.settle()
    planned = [a for d in decisions for a in d.actions if isinstance(a, PlanGeneration)]
    assert [p.job for p in planned] == ["job_b"]


# --- Form --------------------------------------------------------------------------------------


def test_a_decision_carries_the_jobs_sentence() -> None:
    cluster = running(8)
    cluster.kill("vm-1")
    decision = next(d for d in cluster.decide() if d.job == "job_a")
    moved = next(a for a in decision.actions if isinstance(a, MoveJob))
    assert decision.because == moved.message


def test_a_finished_job_is_left_alone() -> None:
    cluster = running(4, submitted=job(steps=26))
    cluster.step()
    cluster.settle()
    over = the_job(cluster)
    world = cluster.world.__class__((*cluster.nodes.values(),), (over,), 0.0)
    touched = [d for d in reconcile(world, cluster.now, cluster.rules) if d.job]
    assert touched == []
    assert not [a for d in touched for a in d.actions if isinstance(a, Launch | MarkDone)]
