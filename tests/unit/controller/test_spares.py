"""Nodes without a seat get ready for one, so that who is lost is replaced at once."""

import pytest

from controller.core.actions import PrepareSpares, QuarantineNode
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState
from controller.core.world import Preparation
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_reconcile import recover, running, start, the_job


def ready(cluster: Cluster) -> dict[str, str]:
    """Who was told to get ready, and for which job."""
    nodes = cluster.nodes.values()
    return {node.name: node.preparation.job for node in nodes if node.preparation}


def told(cluster: Cluster) -> list[str]:
    """Whom this look would tell."""
    decisions = reconcile(cluster.world, cluster.now, cluster.rules)
    orders = [a for d in decisions for a in d.actions if isinstance(a, PrepareSpares)]
    return [spare.node for order in orders for spare in order.spares]


def with_spares(nodes: int = 4, seats: int = 2) -> Cluster:
    return running(nodes, submitted=job(nodes=f"2..{seats}"))


def test_who_holds_no_seat_gets_ready_for_one_and_is_told_so_once() -> None:
    cluster = with_spares()
    assert ready(cluster) == {"vm-2": "job_a", "vm-3": "job_a"}
    cluster.step(steps=20)
    cluster.pass_time(600)
    assert told(cluster) == []


def test_nobody_is_told_before_the_launch_has_come_to_its_first_step() -> None:
    cluster = Cluster(job(nodes="2"), nodes=3)
    while cluster.jobs["job_a"].state is not JobState.RUNNING:
        assert not ready(cluster)
        cluster.work()
        cluster.pass_time(0.5)
        cluster.settle()
    assert list(ready(cluster)) == ["vm-2"]


def test_a_vm_that_joins_later_gets_ready_too() -> None:
    cluster = with_spares(2)
    assert not ready(cluster)
    cluster.join("vm-9")
    cluster.settle()
    assert list(ready(cluster)) == ["vm-9"]
    assert "vm-9 gets ready to take a seat that is lost." in cluster.told


def test_as_many_trainers_stand_by_as_could_sit_there() -> None:
    cluster = running(2, submitted=job(nodes="2"), devices=4)
    cluster.join("vm-9", devices=4)
    (decision,) = [d for d in cluster.settle() if d.job]
    (order,) = [a for a in decision.actions if isinstance(a, PrepareSpares)]
    assert [spare.trainers for spare in order.spares] == [4]


def test_a_spare_takes_the_lost_seat_with_the_shape_unchanged() -> None:
    cluster = with_spares(3)
    shape = cluster.generation().shape
    cluster.kill("vm-1")
    cluster.settle()
    recover(cluster)
    seated = {seat.node for seat in cluster.generation().seats}
    assert (cluster.generation().shape, seated) == (shape, {"vm-0", "vm-2"})
    assert not ready(cluster), "it holds a seat now"


def test_no_more_get_ready_than_the_job_may_have() -> None:
    assert list(ready(with_spares(12, seats=3))) == ["vm-3", "vm-4", "vm-5"]


@pytest.mark.parametrize("why", ["told to go", "set aside", "silent"])
def test_who_would_not_be_used_does_not_get_ready(why: str) -> None:
    cluster = with_spares(2)
    cluster.join("vm-9")
    match why:
        case "told to go":
            cluster.notice("vm-9", 100)
        case "set aside":
            cluster.losses["vm-9"] = (cluster.now,) * 3
            cluster.join("vm-9")
        case "silent":
            cluster.freeze("vm-9")
            cluster.pass_time(3)
    cluster.settle()
    assert not ready(cluster)


def test_who_is_ready_for_a_running_job_is_left_to_it() -> None:
    cluster = with_spares(5)
    cluster.jobs["job_b"] = job("b", nodes="2", priority=9)
    start(cluster, "job_b")
    cluster.pass_time(1)
    cluster.settle()
    assert ready(cluster) == {"vm-4": "job_a"}

    cluster.cancel()
    cluster.settle()
    freed = {"vm-0": "job_b", "vm-1": "job_b"}
    assert ready(cluster) == freed, "no more than its most"


def test_who_has_worked_for_another_job_is_told_again() -> None:
    cluster = with_spares(4)
    cluster.jobs["job_b"] = job("b", nodes="2", steps=10)
    start(cluster, "job_b")
    assert not ready(cluster)
    cluster.cancel("job_b")
    cluster.settle()
    assert ready(cluster) == {"vm-2": "job_a", "vm-3": "job_a"}


def test_nobody_gets_ready_for_a_job_that_is_paused() -> None:
    cluster = with_spares(3)
    cluster.pause("job_a")
    cluster.settle()
    assert cluster.generation().state is GenerationState.DRAINING
    cluster.join("vm-9")
    cluster.settle()
    assert "vm-9" not in ready(cluster)


def test_a_spare_that_cannot_get_ready_is_set_aside_and_the_job_is_left_in_peace() -> None:
    cluster = with_spares(3)
    before = the_job(cluster)
    cluster.unable("vm-2")
    (verdict,) = [a for d in cluster.settle() for a in d.actions]
    assert isinstance(verdict, QuarantineNode)
    why = "vm-2 could not get ready for a seat: `setup` line 1 (false) ended with code 1"
    assert verdict.because == f"{why}; set aside for 60 s."
    assert (the_job(cluster).state, the_job(cluster).current) == (before.state, before.current)

    cluster.pass_time(30)
    cluster.step()
    assert told(cluster) == []
    cluster.pass_time(30)
    cluster.settle()
    assert cluster.nodes["vm-2"].preparation == Preparation("job_a"), "it is tried again"


def test_a_spare_that_could_not_get_ready_is_no_last_resort_of_that_job() -> None:
    cluster = with_spares(3)
    cluster.unable("vm-2")
    cluster.settle()
    cluster.kill("vm-1")
    cluster.settle()
    cluster.pass_time(3)
    cluster.settle()
    assert the_job(cluster).state is JobState.WAITING
    assert (
        "1 of at least 2 ready, 1 set aside (job-a failed on vm-2 alone)"
        in the_job(cluster).message
    )
