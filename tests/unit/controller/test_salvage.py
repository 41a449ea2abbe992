"""Stories of losses whose survivors hold the state: what they are told, and what is saved."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from controller.core.actions import Action, EndGeneration, RollForward, Salvage, StandStill
from controller.core.states import GenerationState, JobState, Reason
from controller.core.world import Rules
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from trainer.contract.progress import ExitCode


def two_by_two(*, at_step: int = 25, **rules: float) -> Cluster:
    """Four VMs hold two stages twice; the last checkpoint is that of step 20."""
    submitted = job(nodes="1..4", plan={"depth": 2})
    cluster = Cluster(submitted, rules=Rules(settle=0.0, **rules), nodes=4)  # type: ignore[arg-type]
    cluster.step_seconds = 0.5
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    cluster.step(steps=at_step - cluster.generation().committed)
    cluster.settle()
    assert str(cluster.generation().shape) == "2x2"
    return cluster


def actions(cluster: Cluster, kind: type[Action]) -> list[Action]:
    """Of the next look, which is carried out."""
    return [a for decision in cluster.settle() for a in decision.actions if isinstance(a, kind)]


def shares(found: Iterable[Action]) -> dict[int, tuple[int, ...]]:
    return {
        survivor.rank: layers
        for action in found
        if isinstance(action, Salvage)
        for survivor, layers in zip(action.survivors, action.layers, strict=True)
    }


def go_on(cluster: Cluster) -> str:
    """From planned to the first new step; what was loaded."""
    cluster.list_folder()
    cluster.pass_time(0.3)
    cluster.settle()
    link = cluster.generation().resumed_from
    cluster.step()
    cluster.settle()
    assert cluster.jobs["job_a"].state is JobState.RUNNING
    return link.folder if link else ""


def test_survivors_that_cover_the_model_save_the_last_step_and_nothing_is_lost() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    found = shares(actions(cluster, Salvage))
    assert sorted(layer for layers in found.values() for layer in layers) == list(range(6))
    assert set(found) == {0, 1, 2}, "the layers are spread over all survivors"
    assert cluster.generation().state is GenerationState.HALTED
    assert cluster.jobs["job_a"].state is JobState.RECOVERING
    cluster.survive()
    cluster.settle()
    assert cluster.jobs["job_a"].past[-1].because == "1 of 4 VMs lost; survivors saved step 25."
    assert cluster.generation().state is GenerationState.PLANNED
    message = cluster.jobs["job_a"].message
    assert message == "1 of 4 VMs lost; survivors saved step 25; re-planning on 3 VMs."
    assert go_on(cluster) == "step-000025.g2.salvage"
    launched = "1 of 4 VMs lost; survivors saved step 25; re-planned 2×2 → 2×1, 1 spare;"
    assert any(said.startswith(launched) and "no steps lost" in said for said in cluster.told)


def test_when_no_survivor_holds_a_stage_the_job_goes_on_from_the_disk_at_once() -> None:
    cluster = two_by_two()
    cluster.kill("vm-1", "vm-3")
    assert not actions(cluster, StandStill)
    assert go_on(cluster) == "step-000020.g2"


def test_a_save_that_takes_longer_than_the_steps_at_risk_is_not_ordered() -> None:
    cluster = two_by_two()
    cluster.jobs["job_a"] = replace(cluster.jobs["job_a"], save_rate=1e3)
    cluster.kill("vm-3")
    assert not actions(cluster, StandStill)


def test_right_after_a_checkpoint_there_is_nothing_to_salvage() -> None:
    cluster = two_by_two(at_step=20)
    cluster.kill("vm-3")
    assert not actions(cluster, StandStill)


def test_who_missed_a_vote_that_others_saw_is_handed_it_before_anything_is_saved() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    cluster.halt("job_a", 1, 3, applied=24, prepared=25, vote_step=24, ballot=(0.0,))
    (roll,) = actions(cluster, RollForward)
    assert isinstance(roll, RollForward)
    assert (roll.step, roll.ballot) == (25, (1.0,))
    assert [survivor.rank for survivor in roll.survivors] == [1]
    cluster.survive()
    assert set(shares(actions(cluster, Salvage))) == {0, 1, 2}


def test_what_only_the_dead_have_applied_is_done_again() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    for rank in range(3):
        cluster.halt("job_a", rank, 3, applied=24, prepared=25, vote_step=24, ballot=(0.0,))
    (save,) = actions(cluster, Salvage)
    assert isinstance(save, Salvage) and save.step == 24
    cluster.survive()
    cluster.settle()
    assert go_on(cluster) == "step-000024.g2.salvage"


def test_a_torn_rank_is_no_survivor() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    cluster.halt("job_a", 2, 3, torn=True)
    assert set(shares(actions(cluster, Salvage))) == {0, 1}

    cluster = two_by_two()
    cluster.kill("vm-3")
    cluster.halt("job_a", 1, 3, torn=True)
    (end,) = actions(cluster, EndGeneration)
    assert isinstance(end, EndGeneration) and "no survivor holds every layer" in end.because
    assert go_on(cluster) == "step-000020.g2"


def test_survivors_that_cannot_write_go_on_from_the_newest_checkpoint_and_it_is_said() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    assert actions(cluster, Salvage)
    for rank in range(3):
        cluster.refuse(rank)
    (end,) = actions(cluster, EndGeneration)
    assert isinstance(end, EndGeneration) and "could not write what they hold" in end.because
    assert go_on(cluster) == "step-000020.g2"


def test_who_does_not_report_within_the_bound_is_lost_for_the_cover() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    cluster.unhalt(0)
    assert not actions(cluster, Salvage)
    cluster.pass_time(1.4)
    assert not actions(cluster, Salvage)
    cluster.pass_time(0.2)
    assert set(shares(actions(cluster, Salvage))) == {1, 2}


def test_a_further_loss_gives_its_share_to_who_still_holds_it() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    first = shares(actions(cluster, Salvage))
    cluster.write("job_a", cluster.generation().seats[1])
    cluster.kill("vm-2")
    cluster.pass_time(0.1)
    second = shares(actions(cluster, Salvage))
    assert second == {0: first[2]}, "what is written counts, the rest goes to the other holder"
    cluster.survive()
    cluster.settle()
    assert go_on(cluster) == "step-000025.g2.salvage"


def test_a_further_loss_that_takes_the_last_holder_sends_the_job_to_the_disk() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    assert actions(cluster, Salvage)
    cluster.kill("vm-1")
    for _ in range(3):
        cluster.settle()
        cluster.pass_time(1.0)
    assert go_on(cluster) == "step-000020.g2"


def test_a_share_that_is_not_written_in_time_goes_to_another_or_the_disk_is_taken() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    first = shares(actions(cluster, Salvage))
    for rank in (1, 2):
        cluster.write("job_a", cluster.generation().seats[rank])
    cluster.pass_time(10.1)
    assert shares(actions(cluster, Salvage)) == {2: first[0]}
    cluster.pass_time(10.1)
    cluster.settle()
    assert go_on(cluster) == "step-000020.g2"


def test_a_survivor_that_cannot_write_is_replaced() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    first = shares(actions(cluster, Salvage))
    cluster.refuse(2)
    assert shares(actions(cluster, Salvage)) == {0: first[2]}


def test_a_broken_link_between_healthy_vms_costs_no_steps() -> None:
    cluster = two_by_two()
    for rank in range(4):
        cluster.halt("job_a", rank)
    cluster.pass_time(2.5)
    assert actions(cluster, Salvage)
    cluster.survive()
    cluster.settle()
    assert go_on(cluster) == "step-000025.g2.salvage"
    assert cluster.jobs["job_a"].past[-1].reason is Reason.BAD_PATH_BETWEEN_NODES


def test_a_killed_trainer_is_charged_and_costs_no_steps() -> None:
    cluster = two_by_two()
    cluster.exit(3, signal=9)
    for rank in range(3):
        cluster.halt("job_a", rank, 3)
    cluster.pass_time(0.5)
    assert actions(cluster, Salvage)
    cluster.survive()
    cluster.settle()
    assert cluster.jobs["job_a"].past[-1].charged
    cluster.pass_time(1.0)
    cluster.settle()
    assert go_on(cluster) == "step-000025.g2.salvage"


def test_an_error_of_the_program_is_never_salvaged() -> None:
    cluster = two_by_two()
    cluster.fail(3, ExitCode.PROGRAM_ERROR)
    assert not actions(cluster, StandStill)


def test_a_job_below_its_least_vms_saves_before_it_waits() -> None:
    cluster = two_by_two()
    cluster.jobs["job_a"] = cluster.with_spec(nodes={"min": 4, "max": 4})
    cluster.kill("vm-3")
    assert actions(cluster, Salvage)
    cluster.survive()
    cluster.settle()
    waiting = cluster.jobs["job_a"]
    assert waiting.state is JobState.WAITING
    assert waiting.message.startswith("1 of 4 VMs lost; survivors saved step 25; waiting for VMs")


def test_when_nobody_is_heard_of_the_survivors_are_waited_for_and_then_save() -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    assert actions(cluster, Salvage)
    cluster.freeze("vm-0", "vm-1", "vm-2")
    cluster.pass_time(6)
    cluster.settle()
    assert cluster.jobs["job_a"].state is JobState.WAITING
    cluster.thaw("vm-0", "vm-1", "vm-2")
    cluster.pass_time(1)
    cluster.survive()
    cluster.settle()
    assert go_on(cluster) == "step-000025.g2.salvage"


@pytest.mark.parametrize("moment", ["halted", "saving"])
def test_cancel_wins_while_survivors_stand_still(moment: str) -> None:
    cluster = two_by_two()
    cluster.kill("vm-3")
    if moment == "halted":
        cluster.unhalt(0)
    cluster.settle()
    cluster.cancel()
    cluster.settle()
    assert cluster.jobs["job_a"].state is JobState.CANCELLED
