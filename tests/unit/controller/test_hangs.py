"""What hangs though every VM answers: seen by its phase's bound, dumped, named and left out."""

from dataclasses import replace

import pytest

from controller.core.actions import (
    Action,
    DumpStacks,
    EndGeneration,
    Launch,
    QuarantineNode,
    StandStill,
)
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState, Reason
from controller.core.world import Bounds, Rules
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_quarantine import launching
from tests.unit.controller.test_reconcile import running, the_job
from trainer.contract.progress import ExitCode, Phase


def decided(cluster: Cluster) -> list[Action]:
    decisions = reconcile(cluster.world, cluster.now, cluster.rules)
    return [action for decision in decisions for action in decision.actions]


def kinds(cluster: Cluster) -> list[type[Action]]:
    return [type(action) for action in decided(cluster)]


def one(cluster: Cluster, kind: type[Action]) -> Action:
    (found,) = [action for action in decided(cluster) if isinstance(action, kind)]
    return found


def enter_all(cluster: Cluster, phase: Phase, *but: int) -> None:
    for seat in cluster.generation().seats:
        if seat.rank not in but:
            cluster.enter(seat.rank, phase)


def dumped(cluster: Cluster) -> None:
    """The stacks are ordered, and written."""
    assert isinstance(one(cluster, DumpStacks), DumpStacks)
    cluster.settle()
    assert not decided(cluster), "they are given a moment to be written"
    cluster.pass_time(1)


# --- What is a hang ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "bound"),
    [("boot", 120), ("program", 120), ("load", 300), ("rendezvous", 60), ("first_step", 300)],
)
def test_each_phase_of_a_launch_has_its_bound(phase: str, bound: float) -> None:
    cluster = launching()
    enter_all(cluster, Phase(phase))
    cluster.pass_time(bound)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert DumpStacks in kinds(cluster)


def test_a_phase_counts_from_when_it_was_entered_last() -> None:
    """A rank evaluates and steps in turns."""
    cluster = running(4)
    cluster.pass_time(50)
    enter_all(cluster, Phase.EVALUATION)
    cluster.pass_time(500)
    enter_all(cluster, Phase.STEP)
    cluster.pass_time(60)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


def test_who_waits_for_others_is_not_late() -> None:
    cluster = launching()
    enter_all(cluster, Phase.RENDEZVOUS, 2)
    cluster.enter(2, Phase.PROGRAM)
    cluster.pass_time(119)
    assert not decided(cluster)
    cluster.enter(2, Phase.RENDEZVOUS)
    cluster.pass_time(60)
    assert not decided(cluster), "their common wait begins with the last"


@pytest.mark.parametrize(("seconds", "bound"), [(0.2, 60), (20.0, 200)])
def test_a_step_may_take_ten_times_what_steps_took_lately(seconds: float, bound: float) -> None:
    cluster = running(4)
    cluster.step_seconds = seconds
    cluster.step()
    cluster.pass_time(bound)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


def test_a_save_may_take_ten_times_what_the_measured_rate_predicts() -> None:
    cluster = running(4)
    enter_all(cluster, Phase.SAVE)
    slow = replace(the_job(cluster), save_rate=100_000.0)  # 6 layers of 2.4 MB: 144 s
    cluster.jobs["job_a"] = slow
    cluster.pass_time(1440)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


def test_the_first_weights_may_take_longer() -> None:
    cluster = Cluster(job(nodes="2"), nodes=2, rules=Rules(settle=0.0))
    cluster.settle()
    cluster.list_folder()
    cluster.settle()
    enter_all(cluster, Phase.PROGRAM)
    cluster.pass_time(600)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert DumpStacks in kinds(cluster)
    cluster.settle()
    cluster.pass_time(1)
    assert EndGeneration in kinds(cluster)


def test_what_happened_before_the_controller_was_started_is_nobodys_hang() -> None:
    cluster = running(4)
    cluster.pass_time(300)
    cluster.started_at = cluster.now
    cluster.grace_until = cluster.now + 5
    cluster.pass_time(60)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


def test_while_the_controller_has_only_just_gone_on_nothing_is_called_a_hang() -> None:
    cluster = running(4)
    cluster.pass_time(61)
    cluster.grace_until = cluster.now + 5
    cluster.pass_time(5)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


def test_agents_that_were_cut_off_get_the_time_to_tell_what_they_did() -> None:
    cluster = running(4)
    cluster.freeze(*cluster.nodes)
    cluster.pass_time(300)
    cluster.settle()
    cluster.thaw(*cluster.nodes)
    cluster.pass_time(1)
    cluster.settle()
    cluster.pass_time(59)
    assert not decided(cluster)


def test_a_silence_is_no_part_of_the_bound_and_does_not_begin_it_anew() -> None:
    """The last step is one second old when it begins."""
    cluster = running(2, submitted=job(nodes="2"))
    cluster.pass_time(29)
    cluster.freeze("vm-1")
    cluster.pass_time(100)
    cluster.settle()
    cluster.thaw("vm-1")
    cluster.pass_time(1)
    cluster.settle()
    cluster.pass_time(30)
    assert not decided(cluster)
    cluster.pass_time(0.1)
    assert kinds(cluster) == [DumpStacks]


@pytest.mark.parametrize("gap", [2.1, 4.9])
def test_gaps_between_beats_now_and_then_put_no_hang_off(gap: float) -> None:
    cluster = running(4)
    began = cluster.now - 1
    while DumpStacks not in kinds(cluster):
        cluster.settle()
        cluster.freeze("vm-1")
        cluster.pass_time(gap)
        cluster.thaw("vm-1")
        cluster.pass_time(0.1)
        assert cluster.now <= began + 60 + 2 * (gap + 0.1)
    assert cluster.nodes["vm-1"].silences, "there were some"


def test_who_was_away_for_long_may_tell_first_what_it_did() -> None:
    cluster = running(2, submitted=job(nodes="2"))
    cluster.pass_time(58.9)
    cluster.freeze("vm-1")
    cluster.pass_time(5.1)
    cluster.settle()
    cluster.thaw("vm-1")
    cluster.pass_time(1)
    cluster.settle()
    cluster.pass_time(0.9)
    assert not decided(cluster)
    cluster.pass_time(0.2)
    assert kinds(cluster) == [DumpStacks]


def test_while_a_vm_does_not_answer_nothing_is_called_a_hang() -> None:
    cluster = running(4, submitted=job(nodes="4"))
    cluster.freeze("vm-1")
    cluster.pass_time(3)
    cluster.now += 100
    assert DumpStacks not in kinds(cluster)


# --- What follows --------------------------------------------------------------------------------


def test_stacks_are_dumped_then_all_are_halted_and_who_does_not_stand_still_is_named() -> None:
    cluster = running(4)
    cluster.step_seconds = 0.5
    cluster.step()
    cluster.pass_time(60.1)
    dumped(cluster)
    still = one(cluster, StandStill)
    assert isinstance(still, StandStill)
    assert (still.state, still.reason) == (GenerationState.HALTED, Reason.HANG)
    cluster.settle()
    for seat in cluster.generation().seats:
        if seat.rank != 2:
            cluster.halt("job_a", seat.rank)
    cluster.pass_time(9.9)
    cluster.settle()
    assert cluster.generation().state is GenerationState.HALTED
    cluster.halt("job_a", 2, torn=True)
    for _ in range(3):
        cluster.settle()
        cluster.survive()
    over = the_job(cluster).past[-1]
    assert (over.reason, over.blamed) == (Reason.HANG, "vm-2")
    assert "rank 2 on vm-2 hangs (its stacks are in its log)" in over.because


def test_who_is_frozen_says_nothing_and_is_named_when_the_others_have_stood_for_long() -> None:
    cluster = hung_at_its_first_step()
    for seat in cluster.generation().seats:
        if seat.rank != 1:
            cluster.halt("job_a", seat.rank)
    cluster.pass_time(11.9)
    cluster.settle()
    assert cluster.generation().state is GenerationState.HALTED
    cluster.pass_time(0.1)
    node = cluster.generation().seats[1].node
    cluster.settle()
    assert the_job(cluster).past[-1].blamed == node


def hung_at_its_first_step() -> Cluster:
    cluster = launching()
    enter_all(cluster, Phase.FIRST_STEP)
    cluster.pass_time(300.1)
    dumped(cluster)
    cluster.settle()
    assert cluster.generation().state is GenerationState.HALTED
    return cluster


def test_a_step_that_comes_while_stacks_are_written_was_no_hang() -> None:
    cluster = running(4)
    cluster.pass_time(60.1)
    cluster.settle()
    cluster.pass_time(0.5)
    cluster.step()
    cluster.pass_time(1)
    assert not decided(cluster)
    cluster.pass_time(60)
    assert kinds(cluster) == [DumpStacks], "the next one is dumped again"


def test_who_alone_is_late_in_a_phase_of_its_own_is_named_and_blamed() -> None:
    cluster = launching()
    enter_all(cluster, Phase.RENDEZVOUS, 3)
    cluster.enter(3, Phase.PROGRAM)
    cluster.pass_time(120.1)
    dumped(cluster)
    end = one(cluster, EndGeneration)
    assert isinstance(end, EndGeneration)
    node = cluster.generation().seats[3].node
    assert (end.reason, end.charged, end.blamed) == (Reason.HANG, False, node)
    assert end.because == f"Rank 3 on {node} did not get past program in 2 m."


def test_a_single_rank_that_hangs_is_ended() -> None:
    cluster = running(1, submitted=job(nodes="1"))
    cluster.pass_time(60.1)
    dumped(cluster)
    end = one(cluster, EndGeneration)
    assert isinstance(end, EndGeneration)
    assert end.because == "No step for 60 s though every VM answers."


# --- Paths between nodes -------------------------------------------------------------------------


def test_when_all_answer_the_next_launch_waits_for_them_to_try_their_paths() -> None:
    cluster = hung_at_its_first_step()
    cluster.survive()
    cluster.settle()
    assert the_job(cluster).past[-1].blamed is None
    cluster.pass_time(1)
    cluster.settle()
    assert [name for name, _ in cluster.generation().paths] == [f"vm-{i}" for i in range(4)]
    cluster.cut = {frozenset(("vm-0", "vm-1")), frozenset(("vm-1", "vm-3"))}
    cluster.list_folder()
    cluster.settle()
    because = "vm-1 has no path to vm-0 and vm-3; set aside for 60 s."
    assert cluster.quarantines["vm-1"].because == because


def test_a_launch_goes_on_without_one_of_a_bad_pair() -> None:
    cluster = running(4)
    cluster.halt("job_a", 0)
    cluster.pass_time(2)
    cluster.settle()
    assert the_job(cluster).past[-1].reason is Reason.BAD_PATH_BETWEEN_NODES
    cluster.cut = {frozenset(("vm-0", "vm-2"))}
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    cluster.settle()
    assert "vm-2" not in {seat.node for seat in cluster.generation().seats}
    assert cluster.generation().state is GenerationState.LAUNCHING
    assert list(cluster.quarantines) == ["vm-2"]


def test_who_does_not_say_whom_it_reaches_is_not_waited_for_long() -> None:
    cluster = running(4)
    cluster.halt("job_a", 0)
    cluster.pass_time(2)
    cluster.settle()
    planned = cluster.generation()
    unsaid = planned.paths
    cluster.list_folder()
    cluster.jobs["job_a"] = replace(
        the_job(cluster), current=replace(cluster.generation(), paths=unsaid)
    )
    cluster.pass_time(5.9)
    assert Launch not in kinds(cluster)
    cluster.pass_time(0.2)
    assert Launch in kinds(cluster)


def test_a_vm_that_was_lost_is_no_reason_to_doubt_the_paths() -> None:
    cluster = running(4)
    cluster.kill("vm-1")
    cluster.settle()
    assert not cluster.generation().paths


def test_launches_that_hang_are_given_up_with_the_reason() -> None:
    """Back-off, the paths, and at last a sentence."""
    cluster = running(4)
    cluster.rules = replace(cluster.rules, bounds=Bounds(rendezvous=1))
    cluster.fail(0, ExitCode.STALE)
    tested = 0
    for _ in range(400):
        cluster.settle()
        found = the_job(cluster)
        if found.state.is_over:
            break
        if found.current and found.current.state is GenerationState.PLANNED:
            tested += bool(found.current.paths)
            cluster.list_folder()
        elif found.current:
            enter = [s for s in found.current.seats if s.phase is None]
            for seat in enter:
                cluster.enter(seat.rank, Phase.RENDEZVOUS)
        cluster.pass_time(0.6)
    assert (the_job(cluster).state, the_job(cluster).reason) == (
        JobState.FAILED, Reason.RESTART_BUDGET,
    )  # fmt: skip
    assert tested
    assert the_job(cluster).message == (
        "No rank got past rendezvous in 1 s though every VM answers."
        " Given up: 6 launches in a row came to nothing."
    )
    assert not [a for a in decided(cluster) if isinstance(a, QuarantineNode)]
