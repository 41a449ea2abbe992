"""Who is lost, and who is not: every signal of protocol.md, section 7, and its false alarms."""

from dataclasses import replace

import pytest

from controller.core.actions import EndGeneration, MarkNode
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_reconcile import running, the_job
from trainer.contract.progress import ExitCode


def lost(cluster: Cluster) -> dict[str, str]:
    """Whom this look would mark lost, and the sentence."""
    decisions = reconcile(cluster.world, cluster.now, cluster.rules)
    marks = [a for d in decisions for a in d.actions if isinstance(a, MarkNode)]
    return {m.node: m.because for m in marks if m.state.is_gone}


def is_quiet(cluster: Cluster) -> bool:
    return not reconcile(cluster.world, cluster.now, cluster.rules)


def test_a_suspect_that_a_peer_names_is_lost_at_once() -> None:
    cluster = running(4)
    cluster.kill("vm-1")
    found = lost(cluster)
    assert list(found) == ["vm-1"]
    assert found["vm-1"].endswith("lost its link to vm-1, whose agent has gone away.")


def test_a_peer_that_only_halted_itself_is_not_lost_though_it_is_named() -> None:
    """An error travels down the chain: each that fails halts, and the next names it."""
    cluster = running(4)
    cluster.kill("vm-1")
    for seat in cluster.generation().seats:
        if seat.node != "vm-1":
            cluster.halt("job_a", seat.rank, *range(4))
    assert list(lost(cluster)) == ["vm-1"]


def test_a_collective_that_names_several_convicts_the_suspects_among_them() -> None:
    cluster = running(8)
    cluster.kill("vm-1", "vm-2", "vm-5")
    assert sorted(lost(cluster)) == ["vm-1", "vm-2", "vm-5"]


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_a_proxy_that_breaks_every_request_loses_nobody(seconds: float) -> None:
    cluster = running(8)
    cluster.break_requests(*cluster.nodes)
    cluster.now += seconds
    assert is_quiet(cluster)
    cluster.pass_time(0.5)
    assert is_quiet(cluster)


def launching() -> Cluster:
    """Of four, three were launched anew after a loss and have not met yet."""
    cluster = running(4)
    cluster.kill("vm-1")
    cluster.settle()
    cluster.survive()
    cluster.settle()
    cluster.pass_time(0.5)
    cluster.list_folder()
    cluster.settle()
    assert cluster.generation().state is GenerationState.LAUNCHING
    return cluster


def test_a_node_that_goes_away_while_launching_is_lost_before_its_silence_is_long() -> None:
    """Its peers wait for it inside of the rendezvous, where no link tells them."""
    cluster = launching()
    gone = cluster.generation().seats[0].node
    cluster.mute.add(cluster.nodes[gone].incarnation)
    cluster.break_requests(gone)
    cluster.pass_time(1.4)
    assert not lost(cluster)
    cluster.pass_time(0.2)
    assert lost(cluster) == {gone: f"{gone}'s agent has gone away during the launch."}


def test_when_everybody_breaks_off_while_launching_nobody_is_lost_for_it() -> None:
    cluster = launching()
    cluster.freeze(*cluster.nodes)
    cluster.break_requests(*cluster.nodes)
    cluster.pass_time(1.6)
    assert not lost(cluster)


def test_a_suspect_that_says_nothing_while_its_peers_links_are_broken_is_lost() -> None:
    cluster = running(4)
    seat = cluster.generation().seats[1]
    cluster.freeze(seat.node)
    cluster.break_requests(seat.node)
    cluster.halt("job_a", 3)
    cluster.pass_time(1.5)
    assert not lost(cluster)
    cluster.pass_time(0.1)
    assert list(lost(cluster)) == [seat.node]


def test_a_suspect_that_beats_again_is_not_lost() -> None:
    cluster = running(4)
    cluster.break_requests("vm-1")
    cluster.pass_time(0.5)
    cluster.halt("job_a", 0, 1)
    assert not lost(cluster)


def test_a_trainer_that_died_is_no_reason_to_lose_its_node() -> None:
    cluster = running(4)
    seat = cluster.generation().seats[1]
    cluster.exit(1, code=1)
    cluster.halt("job_a", 0, 1)
    cluster.break_requests(seat.node)
    assert not lost(cluster)


def test_an_agent_that_was_told_to_end_is_lost_at_once() -> None:
    cluster = running(4)
    seat = cluster.generation().seats[1]
    cluster.exit(1, code=ExitCode.LEFT)
    cluster.halt("job_a", 0, 1)
    assert not lost(cluster)
    cluster.break_requests(seat.node)
    assert list(lost(cluster)) == [seat.node]


def test_a_trainer_that_was_killed_a_moment_before_its_agent_is_no_alibi() -> None:
    cluster = running(4)
    seat = cluster.generation().seats[1]
    cluster.exit(1, signal=9)
    cluster.kill(seat.node)
    assert list(lost(cluster)) == [seat.node]


def test_a_frozen_node_is_lost_by_silence_after_five_seconds() -> None:
    cluster = running(4)
    cluster.freeze("vm-2")
    cluster.pass_time(5.0)
    assert not lost(cluster)
    cluster.pass_time(0.1)
    assert lost(cluster) == {"vm-2": "vm-2 has not answered for 5 s; treated as lost."}


def test_broken_links_wait_for_the_verdict_on_a_node_that_does_not_answer() -> None:
    cluster = running(4)
    cluster.freeze("vm-2")
    cluster.halt("job_a", 0)
    cluster.pass_time(4.0)
    assert is_quiet(cluster)
    cluster.pass_time(1.1)
    assert list(lost(cluster)) == ["vm-2"]


@pytest.mark.parametrize("index", range(4))
def test_whichever_node_is_lost_the_job_recovers(index: int) -> None:
    cluster = running(4)
    cluster.freeze(cluster.generation().seats[index].node)
    cluster.pass_time(5.1)
    cluster.settle()
    assert the_job(cluster).state is JobState.RECOVERING


def test_commits_are_proof_of_life_however_late_the_beats() -> None:
    cluster = running(4)
    cluster.freeze("vm-2")
    for _ in range(6):
        cluster.pass_time(3)
        cluster.step()
        assert not lost(cluster)
    cluster.pass_time(5.1)
    assert list(lost(cluster)) == ["vm-2"]


def test_nobody_is_lost_by_silence_during_the_grace() -> None:
    cluster = running(4)
    cluster.freeze(*cluster.nodes)
    cluster.pass_time(60)
    cluster.grace_until = cluster.now + 5
    assert is_quiet(cluster)
    cluster.pass_time(4)
    assert is_quiet(cluster)


def test_after_the_grace_those_that_came_back_go_on_and_the_others_are_lost() -> None:
    cluster = running(4)
    cluster.freeze(*cluster.nodes)
    cluster.pass_time(60)
    cluster.grace_until = cluster.now + 5
    cluster.thaw("vm-0", "vm-1", "vm-2")
    cluster.pass_time(5.1)
    assert list(lost(cluster)) == ["vm-3"]


def test_an_idle_node_is_lost_by_silence_alone() -> None:
    cluster = Cluster(nodes=2)
    cluster.settle()
    cluster.freeze("vm-1")
    cluster.break_requests("vm-1")
    cluster.pass_time(5.0)
    assert is_quiet(cluster)
    cluster.pass_time(0.1)
    assert list(lost(cluster)) == ["vm-1"]


def test_silence_ends_a_generation_only_when_a_successor_can_follow() -> None:
    cluster = running(2)
    cluster.freeze("vm-0")
    cluster.pass_time(5.1)
    cluster.settle()
    assert "vm-0" in cluster.nodes
    assert the_job(cluster).state is JobState.WAITING
    assert the_job(cluster).message == (
        "vm-0 has not answered for 5 s; waiting for VMs: 1 of at least 2 ready."
    )
    cluster.join("vm-2")
    decisions = cluster.settle()
    ends = [a for d in decisions for a in d.actions if isinstance(a, EndGeneration)]
    assert len(ends) == 1
    assert "vm-0" not in cluster.nodes


def test_a_new_incarnation_has_a_clock_of_its_own() -> None:
    cluster = running(4)
    cluster.kill("vm-3")
    cluster.settle()
    cluster.join("vm-3")
    cluster.pass_time(4)
    assert "vm-3" not in lost(cluster)
    cluster.freeze("vm-3")
    cluster.pass_time(5.1)
    assert "vm-3" in lost(cluster)


# --- An agent that is silent while its job goes on ------------------------------------------------


def go_on_without_a_word_of(cluster: Cluster, name: str, seconds: int) -> None:
    """Its trainers do their part; its agent says nothing."""
    heard_at = cluster.nodes[name].heard_at
    for _ in range(seconds):
        cluster.pass_time(1)
        cluster.nodes[name] = replace(cluster.nodes[name], heard_at=heard_at, silences=())
        cluster.step()
        cluster.settle()


def test_a_job_that_commits_goes_on_however_late_an_agents_beats_are() -> None:
    cluster = running(4, submitted=job(steps=10_000))
    go_on_without_a_word_of(cluster, "vm-1", 50)
    assert cluster.generation().state is GenerationState.RUNNING
    assert len(the_job(cluster).past) == 1


def test_an_agent_that_stays_mute_is_gone_without_at_a_step_that_the_others_agree_on() -> None:
    cluster = running(4, submitted=job(steps=10_000))
    cluster.step_seconds = 1.0
    go_on_without_a_word_of(cluster, "vm-1", 51)
    assert cluster.generation().state is GenerationState.DRAINING
    assert the_job(cluster).message == (
        "vm-1 has not answered for 50 s though the job goes on;"
        " all stop after the same step and save it."
    )
    at = cluster.generation().committed + 1
    cluster.step(save_every=10**6)
    heard_at = cluster.nodes["vm-1"].heard_at
    for seat in cluster.generation().seats:
        if seat.node != "vm-1":
            cluster.say_stopped(seat.rank)
    cluster.pass_time(0.2)
    cluster.nodes["vm-1"] = replace(cluster.nodes["vm-1"], heard_at=heard_at)
    cluster.mute.add(cluster.nodes["vm-1"].incarnation)
    cluster.settle()
    assert cluster.generation().state is GenerationState.HALTED
    for _ in range(4):
        cluster.work()
        cluster.settle()
        cluster.pass_time(0.5)
    cluster.list_folder()
    cluster.settle()
    link = cluster.generation().resumed_from
    assert link is not None and link.step == at, "no step is lost"
    assert "vm-1" not in {seat.node for seat in cluster.generation().seats}
