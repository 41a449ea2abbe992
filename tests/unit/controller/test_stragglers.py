"""Stories of what ranks say of their pace: a slow node is spared, costs are learned."""

import pytest

from controller.core.actions import StandStill
from controller.core.assign import foresee, problem_of
from controller.core.states import JobState, Reason
from controller.core.stragglers import slow_before
from controller.core.world import Rules
from controller.planner.choose import planner_of
from controller.planner.cutting import Model
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_drain import actions, launched


def running(nodes: int, depth: int = 2) -> Cluster:
    spec = job(nodes=f"1..{nodes}", plan={"depth": depth, "settle": "1h"}, steps=10_000)
    cluster = Cluster(spec, rules=Rules(settle=0.0), nodes=nodes)
    cluster.step_seconds = 0.5
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        cluster.settle()
        cluster.pass_time(0.5)
        cluster.work()
    cluster.step(steps=20)
    cluster.settle()
    return cluster


def nodes_of(cluster: Cluster) -> list[str]:
    return [seat.node for seat in cluster.generation().seats]


def test_a_slow_node_is_named_and_a_spare_takes_its_seat() -> None:
    cluster = running(5)
    assert nodes_of(cluster) == ["vm-0", "vm-1", "vm-2", "vm-3"]
    cluster.pace(1.0, 1.0, 1.0, 1.6)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.reason is Reason.STRAGGLER
    assert still.because == "vm-3 is slow: 1.60× what its stage usually takes"
    cluster.stop()
    cluster.settle()
    launch = launched(cluster)
    assert str(launch.shape) == "2x2"
    assert {seat.node for seat in launch.seats} == {"vm-0", "vm-1", "vm-2", "vm-4"}


def test_a_verdict_holds_for_later_launches_until_it_lapses() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 1.0, 1.6)
    cluster.settle()
    cluster.stop()
    cluster.settle()
    launched(cluster)
    past = cluster.jobs["job_a"]
    slow = slow_before(past, cluster.now, cluster.rules)
    assert {name for name, _ in slow} == {"vm-3"}
    assert not slow_before(past, cluster.now + 2 * cluster.rules.slow_lapses, cluster.rules)


def test_nobody_stops_for_a_node_that_is_a_little_slow_or_slow_for_too_short() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 1.0, 1.25)
    assert not actions(cluster, StandStill)
    cluster.pace(1.0, 1.0, 1.0, 2.0, windows=2)
    assert not actions(cluster, StandStill)


def test_where_every_node_is_needed_the_slow_one_gets_the_last_stage_and_fewer_layers() -> None:
    cluster = running(2)
    before = cluster.generation()
    costs = cluster.jobs["job_a"].costs
    assert costs is not None and before.shape is not None
    first, last = Model(costs, before.shape.micro_batch).cut_at(before.cuts).times
    cluster.pace(2 * first.forward, last.forward)
    (still,) = actions(cluster, StandStill)
    assert isinstance(still, StandStill) and still.because.startswith("vm-0 is slow: 2.00×")
    cluster.stop()
    cluster.settle()
    launch = launched(cluster)
    assert [seat.node for seat in launch.seats] == ["vm-1", "vm-0"]
    assert launch.cuts[2] - launch.cuts[1] < before.cuts[2] - before.cuts[1]


def test_slow_nodes_are_better_than_none() -> None:
    cluster = running(5)
    cluster.pace(1.0, 1.0, 2.5, 2.5)
    cluster.settle()
    cluster.stop()
    cluster.settle()
    assert {seat.node for seat in launched(cluster).seats} == {"vm-0", "vm-1"}
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        cluster.pass_time(0.5)
        cluster.work()
        cluster.settle()
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
