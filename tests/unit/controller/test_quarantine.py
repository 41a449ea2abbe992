"""Nodes that come and go, and nodes on which alone a program fails, are set aside for a while."""

import pytest

from controller.core.actions import EndGeneration, QuarantineNode, ReleaseNode
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState, Reason
from controller.core.world import Quarantine
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_reconcile import recover, running, start, the_job
from trainer.contract.progress import ExitCode, Phase


def verdicts(cluster: Cluster) -> list[QuarantineNode | ReleaseNode]:
    decisions = reconcile(cluster.world, cluster.now, cluster.rules)
    kinds = QuarantineNode | ReleaseNode
    return [a for d in decisions for a in d.actions if isinstance(a, kinds)]


def flap(cluster: Cluster, name: str, times: int = 1, up: float = 8, away: float = 8) -> None:
    """It is there for a while and then silent until it is lost; back at the end."""
    for _ in range(times):
        cluster.pass_time(up)
        cluster.settle()
        cluster.freeze(name)
        for _ in range(int(away)):
            cluster.pass_time(1)
            cluster.settle()
        cluster.mute.clear()
        cluster.join(name)


def test_a_node_that_comes_and_goes_is_set_aside_with_a_sentence() -> None:
    cluster = Cluster(nodes=2)
    flap(cluster, "vm-1", times=2)
    assert not verdicts(cluster)
    flap(cluster, "vm-1")
    (verdict,) = verdicts(cluster)
    assert isinstance(verdict, QuarantineNode)
    assert (verdict.node, verdict.until) == ("vm-1", cluster.now + 60)
    assert verdict.because == "vm-1 was lost 3 times in 5 m; set aside for 60 s."


def test_a_node_that_is_lost_in_the_look_that_would_judge_it_is_judged_when_it_is_back() -> None:
    """Lost once too often, or its time being served."""
    cluster = Cluster(nodes=3)
    cluster.settle()
    cluster.losses["vm-1"] = (cluster.now,) * 3
    cluster.quarantine("vm-1", Quarantine("", 0.0, 0.0, 1, is_over=True))
    cluster.quarantine("vm-2", Quarantine("it broke", cluster.now, cluster.now + 1, 1))
    cluster.freeze("vm-1", "vm-2")
    cluster.pass_time(5.1)
    cluster.settle()
    assert list(cluster.nodes) == ["vm-0"]
    cluster.join("vm-1")
    (verdict,) = verdicts(cluster)
    assert isinstance(verdict, QuarantineNode) and verdict.node == "vm-1"


def test_what_a_node_did_long_ago_does_not_count() -> None:
    cluster = Cluster(nodes=2)
    flap(cluster, "vm-1", times=2)
    cluster.pass_time(301)
    flap(cluster, "vm-1")
    assert not verdicts(cluster)


def test_who_is_set_aside_is_not_used_and_the_others_are_left_in_peace() -> None:
    cluster = running(4, submitted=job(plan={"settle": "1s"}))
    before = len(the_job(cluster).past)
    for _ in range(12):
        flap(cluster, "vm-3")
        for _ in range(4):
            cluster.settle()
            cluster.work()
            cluster.pass_time(0.5)
    launches = [g for g in the_job(cluster).past[before:] if g.launched]
    assert len(launches) <= 3, [g.because for g in launches]
    assert the_job(cluster).state is JobState.RUNNING
    assert "vm-3" not in {seat.node for seat in cluster.generation().seats}


def test_the_time_doubles_up_to_its_cap_and_begins_anew_when_the_last_is_long_ago() -> None:
    cluster = Cluster(nodes=1)
    spans = []
    for _ in range(8):
        flap(cluster, "vm-0", times=3, up=1, away=6)
        cluster.settle()
        aside = cluster.quarantines["vm-0"]
        spans.append(aside.until - aside.since)
        cluster.pass_time(aside.until - cluster.now)
        cluster.settle()
        assert cluster.quarantines["vm-0"].is_over
    assert spans == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    cluster.pass_time(3601)
    flap(cluster, "vm-0", times=3, up=1, away=6)
    cluster.settle()
    assert cluster.quarantines["vm-0"].times == 1


def test_who_still_comes_and_goes_while_set_aside_is_not_let_in() -> None:
    cluster = Cluster(nodes=2)
    flap(cluster, "vm-1", times=3)
    cluster.settle()
    flap(cluster, "vm-1", times=5)
    assert cluster.quarantines["vm-1"].times == 2


def test_a_node_is_used_again_when_its_time_is_over() -> None:
    cluster = Cluster(nodes=2)
    flap(cluster, "vm-1", times=3)
    cluster.settle()
    cluster.pass_time(59)
    assert not verdicts(cluster)
    cluster.pass_time(1)
    assert verdicts(cluster) == [ReleaseNode("vm-1", "vm-1 is no longer set aside.")]


def test_a_node_that_a_person_releases_begins_with_a_clean_record() -> None:
    cluster = Cluster(nodes=2)
    flap(cluster, "vm-1", times=3)
    cluster.settle()
    cluster.release("vm-1")
    assert not verdicts(cluster)
    flap(cluster, "vm-1", times=2)
    assert not verdicts(cluster)


def test_a_vm_that_was_told_to_go_and_goes_has_done_nothing_wrong() -> None:
    cluster = Cluster(nodes=2)
    for _ in range(4):
        cluster.notice("vm-1", 5)
        flap(cluster, "vm-1")
    assert not verdicts(cluster)


def test_a_job_that_waits_says_who_is_set_aside() -> None:
    cluster = Cluster(job(nodes="3"), nodes=2)
    flap(cluster, "vm-1", times=3)
    cluster.settle()
    assert the_job(cluster).message == "Waiting for VMs: 1 of at least 3 ready, 1 set aside."
    assert the_job(cluster).reason is Reason.TOO_FEW_NODES


# --- The last resort -----------------------------------------------------------------------------


def set_aside(cluster: Cluster, name: str, times: int = 1, seconds: float = 600.0) -> None:
    """It is for a while, not for what it did to a job."""
    because = f"{name} was lost 3 times in 5 m"
    cluster.quarantine(name, Quarantine(because, cluster.now, cluster.now + seconds, times))


def seated(cluster: Cluster) -> set[str]:
    return {name for name, _ in cluster.generation().nodes}


def test_rather_than_wait_a_job_uses_who_is_set_aside_and_says_so() -> None:
    cluster = Cluster(job(nodes="2"), nodes=2)
    flap(cluster, "vm-1", times=3)
    assert cluster.settle()
    assert the_job(cluster).message.endswith("vm-1 is set aside and used as a last resort.")
    start(cluster)
    assert seated(cluster) == {"vm-0", "vm-1"}
    said = cluster.generation().because
    assert said == "Starting 1×2 on 2 VMs. vm-1 is set aside and used as a last resort."


def test_no_more_are_used_than_a_job_lacks_and_first_who_was_set_aside_least() -> None:
    cluster = Cluster(job(nodes="3.."), nodes=5)
    set_aside(cluster, "vm-0", times=3)
    set_aside(cluster, "vm-1", times=2)
    set_aside(cluster, "vm-2", times=2, seconds=300.0)
    cluster.settle()
    assert the_job(cluster).message.startswith("Planning on 3 VMs. vm-2 is set aside")


def test_where_others_are_enough_nobody_who_is_set_aside_is_used() -> None:
    cluster = Cluster(job(nodes="2.."), nodes=3)
    set_aside(cluster, "vm-1")
    cluster.settle()
    assert the_job(cluster).message == "Planning on 2 VMs."


def test_a_job_goes_on_without_a_silent_vm_on_one_that_is_set_aside() -> None:
    cluster = running(2, submitted=job(nodes="2"))
    cluster.join("vm-2")
    set_aside(cluster, "vm-2")
    cluster.freeze("vm-1")
    cluster.pass_time(5.1)
    cluster.settle()
    recover(cluster)
    assert seated(cluster) == {"vm-0", "vm-2"}


def test_who_has_no_path_to_a_silent_vm_may_take_its_place() -> None:
    cluster = running(2, submitted=job(nodes="2"))
    cluster.join("vm-2")
    aside = Quarantine("no path", cluster.now, cluster.now + 600, 1, unreached=("vm-1",))
    cluster.quarantine("vm-2", aside)
    cluster.freeze("vm-1")
    cluster.pass_time(5.1)
    cluster.settle()
    recover(cluster)
    assert seated(cluster) == {"vm-0", "vm-2"}


def test_a_job_does_not_grow_onto_who_is_set_aside() -> None:
    cluster = running(2, submitted=job(plan={"depth": 2, "settle": "1s"}))
    for name in ("vm-2", "vm-3"):
        cluster.join(name)
        set_aside(cluster, name)
    cluster.pass_time(61)
    cluster.step()
    cluster.settle()
    assert cluster.generation().state is GenerationState.RUNNING


def test_a_last_resort_takes_the_place_that_is_needed_least() -> None:
    cluster = Cluster(job(nodes="3", plan={"depth": 2}), nodes=3)
    set_aside(cluster, "vm-0")
    start(cluster)
    assert seated(cluster) == {"vm-1", "vm-2"}
    assert "last resort" not in cluster.generation().because


def test_who_would_only_fail_again_is_no_last_resort() -> None:
    cluster = running(4, submitted=job(nodes="4"))
    fail_on(cluster, "vm-2")
    recover(cluster)
    fail_on(cluster, "vm-2")
    assert the_job(cluster).state is JobState.WAITING
    assert the_job(cluster).message == (
        "Waiting for VMs: 3 of at least 4 ready, 1 set aside (job-a failed on vm-2 alone)."
    )


def test_where_one_job_fails_another_may_be_run_as_the_very_last_resort() -> None:
    cluster = running(4)
    fail_on(cluster, "vm-2")
    recover(cluster)
    fail_on(cluster, "vm-2")
    recover(cluster)
    cluster.join("vm-4")
    set_aside(cluster, "vm-4", times=5)
    cluster.jobs["job_b"] = job("b", nodes="2")
    cluster.settle()
    assert cluster.jobs["job_b"].message == (
        "Planning on 2 VMs. vm-2 and vm-4 are set aside and used as a last resort."
    )
    cluster.jobs["job_b"] = job("b", nodes="1")
    cluster.settle()
    assert cluster.jobs["job_b"].message.startswith("Planning on 1 VM. vm-4 is")


def cut(*names: str) -> set[frozenset[str]]:
    return {frozenset(names)}


def of_a_bad_pair(cluster: Cluster) -> Cluster:
    """vm-2 has no path to vm-0, and the next launch finds that out."""
    cluster.halt("job_a", 0)
    cluster.pass_time(2)
    cluster.settle()
    cluster.cut = cut("vm-0", "vm-2")
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    return cluster


def test_when_too_few_reach_each_other_the_job_waits_and_says_who_does_not() -> None:
    cluster = of_a_bad_pair(running(3, submitted=job(nodes="3")))
    assert (the_job(cluster).state, the_job(cluster).reason) == (
        JobState.WAITING, Reason.TOO_FEW_NODES,
    )  # fmt: skip
    assert the_job(cluster).message == (
        "vm-2 has no path to vm-0, and too few VMs are left without it; waiting for VMs:"
        " 2 of at least 3 ready, 1 set aside."
    )
    assert cluster.quarantines["vm-2"].unreached == ("vm-0",)
    cluster.join("vm-3")
    cluster.settle()
    recover(cluster)
    assert seated(cluster) == {"vm-0", "vm-1", "vm-3"}


def test_a_job_that_is_to_fail_below_its_fewest_fails_when_too_few_reach_each_other() -> None:
    submitted = job(nodes="3", recovery={"below_min": "fail"})
    cluster = of_a_bad_pair(running(3, submitted=submitted))
    assert (the_job(cluster).state, the_job(cluster).reason) == (
        JobState.FAILED, Reason.TOO_FEW_NODES,
    )  # fmt: skip


def test_waiting_for_a_path_ends_though_it_is_tried_again_and_again() -> None:
    submitted = job(nodes="3", recovery={"max_wait": "20m"})
    cluster = of_a_bad_pair(running(3, submitted=submitted))
    began = cluster.now
    while not the_job(cluster).state.is_over:
        cluster.settle()
        if the_job(cluster).current:
            cluster.list_folder()
        cluster.pass_time(1)
        assert cluster.now < began + 1300
    assert cluster.quarantines["vm-2"].times > 3, "it was tried meanwhile"
    assert the_job(cluster).message.endswith("1 set aside. Given up after 20 m.")


def test_who_has_no_path_to_a_vm_that_is_gone_is_a_last_resort_for_the_others() -> None:
    cluster = of_a_bad_pair(running(4, submitted=job(nodes="3..4")))
    assert seated(cluster) == {"vm-0", "vm-1", "vm-3"}
    cluster.step()
    cluster.settle()
    cluster.kill("vm-0")
    cluster.settle()
    recover(cluster)
    assert seated(cluster) == {"vm-1", "vm-2", "vm-3"}


# --- A node on which alone the program fails ------------------------------------------------------


def seat_of(cluster: Cluster, node: str) -> int:
    return next(seat.rank for seat in cluster.generation().seats if seat.node == node)


def fail_on(cluster: Cluster, node: str) -> None:
    """The program fails there, and the job gets to its first step elsewhere or again."""
    cluster.fail(seat_of(cluster, node), ExitCode.PROGRAM_ERROR, "no such library")
    cluster.settle()
    cluster.pass_time(5)
    cluster.settle()


def test_a_node_on_which_alone_the_program_fails_twice_in_a_row_is_set_aside() -> None:
    cluster = running(4)
    fail_on(cluster, "vm-2")
    assert the_job(cluster).past[-1].blamed == "vm-2"
    recover(cluster)
    fail_on(cluster, "vm-2")
    aside = cluster.quarantines["vm-2"]
    assert aside.because == (
        "job-a failed 2 times in a row on vm-2 and on no other VM; set aside for 60 s."
    )
    recover(cluster)
    assert "vm-2" not in {seat.node for seat in cluster.generation().seats}
    assert the_job(cluster).state is JobState.RUNNING


def test_seats_are_dealt_anew_after_a_failure_so_that_a_bad_layer_blames_nobody_twice() -> None:
    cluster = running(4)
    for _ in range(2):
        cluster.fail(1, ExitCode.PROGRAM_ERROR, "layer 3 is broken")
        cluster.settle()
        cluster.pass_time(5)
        cluster.settle()
        recover(cluster)
    blamed = [g.blamed for g in the_job(cluster).past[-2:]]
    assert None not in blamed and blamed[0] != blamed[1]
    assert not cluster.quarantines


def test_an_error_of_all_ranks_at_one_step_blames_nobody_though_one_is_heard_of_first() -> None:
    cluster = running(2)
    cluster.exit(1, code=ExitCode.PROGRAM_ERROR)
    assert not ends(cluster), "the other stands still at once, or fails as well"
    cluster.pass_time(0.2)
    cluster.exit(0, code=ExitCode.PROGRAM_ERROR)
    (end,) = ends(cluster)
    assert end.charged and end.blamed is None


def test_who_neither_fails_nor_stands_still_is_not_waited_for_long() -> None:
    cluster = running(2)
    cluster.exit(1, code=ExitCode.PROGRAM_ERROR)
    cluster.pass_time(0.3)
    (end,) = ends(cluster)
    assert end.blamed == cluster.generation().seats[1].node


def test_a_node_alone_in_its_generation_is_not_blamed() -> None:
    cluster = running(1, submitted=job(nodes="1"))
    fail_on(cluster, "vm-0")
    assert the_job(cluster).past[-1].blamed is None


def importing(cluster: Cluster, *passed: int) -> None:
    """All ranks import the program; those of ``passed`` are done with it."""
    for seat in cluster.generation().seats:
        phase = Phase.RENDEZVOUS if seat.rank in passed else Phase.PROGRAM
        cluster.enter(seat.rank, phase)


@pytest.mark.parametrize("passed", [(0, 2, 3), ()])
def test_who_fails_before_ranks_meet_waits_for_the_others_to_fail_or_pass(
    passed: tuple[int, ...],
) -> None:
    cluster = launching()
    importing(cluster)
    cluster.fail(1, ExitCode.PROGRAM_ERROR, "no such module")
    cluster.settle()
    cluster.pass_time(1)
    assert not ends(cluster)
    if passed:
        importing(cluster, *passed)
    else:
        for rank in (0, 2, 3):
            cluster.fail(rank, ExitCode.PROGRAM_ERROR, "no such module")
    (end,) = ends(cluster)
    assert end.blamed == (cluster.generation().seats[1].node if passed else None)
    assert end.charged


def test_who_fails_before_ranks_meet_is_not_waited_for_long() -> None:
    cluster = launching()
    importing(cluster)
    cluster.fail(1, ExitCode.PROGRAM_ERROR, "no such module")
    cluster.pass_time(10)
    (end,) = ends(cluster)
    assert end.charged


def launching() -> Cluster:
    cluster = Cluster(job(nodes="4"), nodes=4)
    start(cluster)
    cluster.fail(0, ExitCode.STALE)
    cluster.settle()
    cluster.list_folder()
    cluster.pass_time(0.5)
    cluster.settle()
    return cluster


def ends(cluster: Cluster) -> list[EndGeneration]:
    decisions = reconcile(cluster.world, cluster.now, cluster.rules)
    return [a for d in decisions for a in d.actions if isinstance(a, EndGeneration)]


def test_the_first_failure_in_time_is_the_cause() -> None:
    cluster = running(4)
    cluster.fail(3, ExitCode.PROGRAM_ERROR, "the cause")
    cluster.pass_time(0.1)
    cluster.fail(0, ExitCode.INTERNAL, "a consequence")
    (end,) = ends(cluster)
    assert end.because == "Rank 3 on vm-3: the cause."


def test_a_kill_that_came_first_is_the_cause_of_what_peers_fail_by() -> None:
    cluster = running(4)
    cluster.exit(2, signal=9)
    cluster.pass_time(0.1)
    cluster.fail(0, ExitCode.INTERNAL, "a consequence")
    assert not ends(cluster)
    cluster.pass_time(0.2)
    (end,) = ends(cluster)
    assert end.because.startswith("Rank 2 on vm-2 was killed by signal 9")


def test_a_peer_that_lost_its_link_is_never_the_cause() -> None:
    cluster = running(4)
    cluster.fail(0, ExitCode.PEER_LOST, "rank 1 hung up")
    cluster.pass_time(0.1)
    cluster.fail(1, ExitCode.CHECKPOINT_UNREACHABLE, "no such folder")
    (end,) = ends(cluster)
    assert end.reason is Reason.CHECKPOINT_UNREACHABLE
