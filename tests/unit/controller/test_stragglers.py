"""Stories of what ranks say of their pace: a slow node is spared, costs are learned."""

from typing import TypeVar

import pytest

from controller.core.actions import Action, Launch, MarkSlow, StandStill
from controller.core.assign import foresee, problem_of
from controller.core.states import GenerationState, JobState, Reason
from controller.core.world import Rules
from controller.planner.choose import planner_of
from controller.planner.cutting import Model
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_drain import launched
from trainer.contract.topology import Seat

T = TypeVar("T", bound=Action)


def running(nodes: int, depth: int = 2, most: int = 0, layers: int = 6) -> Cluster:
    spec = job(nodes=f"1..{most or nodes}", plan={"depth": depth, "settle": "1h"}, steps=10_000)
    cluster = Cluster(spec, rules=Rules(settle=0.0), nodes=nodes)
    cluster.step_seconds, cluster.layers = 0.5, layers
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    cluster.step(steps=20)
    cluster.settle()
    return cluster


def nodes_of(cluster: Cluster) -> list[str]:
    return [seat.node for seat in cluster.generation().seats]


def done(cluster: Cluster) -> list[Action]:
    """All that is done until it is quiet."""
    found: list[Action] = []
    while decisions := cluster.decide():
        found += [action for decision in decisions for action in decision.actions]
    return found


def of(kind: type[T], actions: list[Action]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def moved(cluster: Cluster) -> Launch:
    """It stops and saves, is launched anew, and runs."""
    cluster.stop()
    cluster.settle()
    launch = launched(cluster)
    while cluster.jobs["job_a"].state is not JobState.RUNNING or not cluster.generation().committed:
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    cluster.settle()
    return launch


def usual(cluster: Cluster, **slow: float) -> list[float]:
    """By rank, what a forward takes as calibrated, times what the node is slow (``vm_0=2``)."""
    g, costs = cluster.generation(), cluster.jobs["job_a"].costs
    assert g.shape is not None and costs is not None
    times = Model(costs, g.shape.micro_batch).cut_at(g.cuts).times
    return [
        times[Seat.of(s.rank, g.shape).stage].forward * slow.get(s.node.replace("-", "_"), 1.0)
        for s in g.seats
    ]


def layers_of(cluster: Cluster, node: str) -> int:
    g = cluster.generation()
    assert g.shape is not None
    (rank,) = (seat.rank for seat in g.seats if seat.node == node)
    stage = Seat.of(rank, g.shape).stage
    return g.cuts[stage + 1] - g.cuts[stage]


def test_a_slow_node_is_named_and_a_spare_takes_its_seat() -> None:
    cluster = running(5)
    assert nodes_of(cluster) == ["vm-0", "vm-1", "vm-2", "vm-3"]
    cluster.pace(1.0, 1.0, 1.0, 1.6)
    actions = done(cluster)
    (mark,) = of(MarkSlow, actions)
    assert mark.node == "vm-3" and mark.slow.factor == 1.6
    (still,) = of(StandStill, actions)
    assert still.reason is Reason.STRAGGLER
    assert still.because == "vm-3 is slow: 1.60× what its stage usually takes"
    launch = moved(cluster)
    assert str(launch.shape) == "2x2"
    assert {seat.node for seat in launch.seats} == {"vm-0", "vm-1", "vm-2", "vm-4"}
    assert launch.because.endswith("vm-3, which is slow, stays spare.")


def later(cluster: Cluster, seconds: float) -> list[Action]:
    """What is done so long after, while its steps go on."""
    cluster.pass_time(seconds)
    cluster.step()
    return done(cluster)


def test_who_is_spared_is_tried_again_after_a_while_and_after_twice_that_the_next_time() -> None:
    cluster = running(5)
    lapses = cluster.rules.slow_lapses
    for spared in (lapses, 2 * lapses):
        (slow,) = [name for name in nodes_of(cluster) if name in ("vm-3", "vm-4")]
        cluster.pace(*usual(cluster, **{slow.replace("-", "_"): 1.6}))
        (mark,) = of(MarkSlow, done(cluster))
        assert mark.node == slow
        moved(cluster)
        if mark.slow.times == 1 and slow == "vm-3":
            assert "vm-4" in nodes_of(cluster)
        assert not of(MarkSlow, later(cluster, spared - 30))
        assert [mark.slow.is_over for mark in of(MarkSlow, later(cluster, 60))] == [True]
        cluster.join("vm-4")  # anew, so that the job needs vm-3 again
        while "vm-3" not in nodes_of(cluster) or not cluster.generation().committed:
            cluster.pass_time(0.5)
            cluster.settle()
            cluster.work()
        cluster.settle()


def test_a_node_that_comes_back_begins_anew() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 1.0, 1.6)
    cluster.settle()
    cluster.join("vm-3")
    assert cluster.nodes["vm-3"].slow is None


def test_nobody_stops_for_a_node_that_is_a_little_slow_or_slow_for_too_short() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 1.0, 1.25)
    assert not done(cluster)
    cluster.pace(1.0, 1.0, 1.0, 2.0, windows=2)
    assert not done(cluster)


def test_where_every_node_is_needed_the_slow_one_gets_the_last_stage_and_fewer_layers() -> None:
    cluster = running(2)
    before = layers_of(cluster, "vm-0")
    cluster.pace(*usual(cluster, vm_0=4.0))
    (still,) = of(StandStill, done(cluster))
    assert still.because.startswith("vm-0 is slow: 4.00×")
    launch = moved(cluster)
    assert nodes_of(cluster) == ["vm-1", "vm-0"]
    assert layers_of(cluster, "vm-0") < before
    assert launch.because.endswith("vm-0, which is slow, gets 1 layer of 6.")


def test_a_plan_that_was_made_for_a_slow_node_stays_while_it_is_slow() -> None:
    cluster = running(2)
    for _ in range(3):
        cluster.pace(*usual(cluster, vm_0=4.0))
        cluster.settle()
        if cluster.generation().state is GenerationState.DRAINING:
            moved(cluster)
        later(cluster, 30)
    assert len([g for g in cluster.jobs["job_a"].past if g.reason is Reason.STRAGGLER]) == 1


def test_a_node_that_is_as_fast_as_the_others_again_gets_as_much_to_do() -> None:
    cluster = running(2)
    before = layers_of(cluster, "vm-0")
    cluster.pace(*usual(cluster, vm_0=4.0))
    cluster.settle()
    moved(cluster)
    cluster.pace(*usual(cluster))
    actions = done(cluster)
    assert [mark.slow.is_over for mark in of(MarkSlow, actions)] == [True]
    (still,) = of(StandStill, actions)
    assert still.because == "vm-0 is as fast as the others again"
    moved(cluster)
    assert layers_of(cluster, "vm-0") == before
    cluster.pace(*usual(cluster))
    assert not done(cluster)


def test_who_is_slow_is_named_though_no_plan_would_be_faster() -> None:
    cluster = running(2, layers=2)
    cluster.pace(*usual(cluster, vm_1=1.5))
    actions = done(cluster)
    assert [mark.node for mark in of(MarkSlow, actions)] == ["vm-1"]
    assert not of(StandStill, actions)
    assert cluster.nodes["vm-1"].slow


def test_who_becomes_much_slower_is_weighed_again() -> None:
    cluster = running(2, layers=2)
    cluster.pace(*usual(cluster, vm_1=1.5))
    cluster.settle()
    cluster.pace(*usual(cluster, vm_1=1.6))
    assert not done(cluster)
    cluster.pace(*usual(cluster, vm_1=4.0))
    (mark,) = of(MarkSlow, done(cluster))
    assert mark.slow.factor == 4.0 and mark.slow.times == 1


def test_a_job_that_has_its_most_nodes_changes_the_slow_one_for_a_free_one() -> None:
    cluster = running(5, most=4)
    assert nodes_of(cluster) == ["vm-0", "vm-1", "vm-2", "vm-3"]
    cluster.pace(1.0, 1.6, 1.0, 1.0)
    cluster.settle()
    moved(cluster)
    assert set(nodes_of(cluster)) == {"vm-0", "vm-2", "vm-3", "vm-4"}


def test_slow_nodes_are_better_than_none() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 9.0, 9.5)
    cluster.settle()
    moved(cluster)
    assert set(nodes_of(cluster)) == {"vm-0", "vm-1"}
    cluster.kill("vm-0", "vm-1")
    cluster.pass_time(10)
    cluster.settle()
    assert [seat.node for seat in launched(cluster).seats] == ["vm-4", "vm-2"]


def test_steps_that_take_longer_than_calibrated_move_the_costs_once() -> None:
    cluster = running(4)
    before, shape = cluster.jobs["job_a"].costs, cluster.generation().shape
    assert before is not None and shape is not None
    times = Model(before, shape.micro_batch).cut_at(cluster.generation().cuts).times
    cluster.pace(*(2 * times[rank % 2].forward for rank in range(4)))
    cluster.step(steps=60)
    cluster.settle()
    after = cluster.jobs["job_a"].costs
    assert after is not None and after.learned_at_step == cluster.generation().committed
    ratio = after.layers[0].forward_seconds / before.layers[0].forward_seconds
    assert ratio == pytest.approx(2.0)
    assert not cluster.settle(), "they are known now"


def test_costs_that_steps_confirm_are_left_alone() -> None:
    cluster = running(4)
    before, shape = cluster.jobs["job_a"].costs, cluster.generation().shape
    assert before is not None and shape is not None
    cutting = Model(before, shape.micro_batch).cut_at(cluster.generation().cuts)
    reduce = cutting.reducing(before, shape.replicas)
    for rank in range(4):
        forward = 1.02 * cutting.times[rank % 2].forward
        cluster.pace_one(rank, forward, reduce[rank % 2])
    cluster.step(steps=60)
    cluster.settle()
    assert cluster.jobs["job_a"].costs is before


def test_answers_for_fewer_nodes_are_found_out_ahead_of_need_one_at_a_time() -> None:
    cluster = running(4)
    job_, nodes = cluster.jobs["job_a"], tuple(cluster.nodes.values())
    planner = planner_of(problem_of(job_, nodes))
    asked = 0
    while foresee(job_, nodes):
        asked += 1
    assert asked <= 4
    assert all(planner.knows(count) for count in range(1, 5))
