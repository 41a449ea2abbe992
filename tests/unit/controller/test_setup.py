"""`setup` lines hold up a launch, are told, and fail a job after a few attempts."""

import pytest

from controller.core.jobspec import JobSpec
from controller.core.states import JobState, Reason
from controller.core.world import Job, Rules
from controller.store.launching import setup_of
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from trainer.contract.progress import ExitCode, Phase


def launched(nodes: int = 2) -> Cluster:
    """A job whose first training generation has just been launched."""
    given = job(setup="pip install polars", setup_timeout="30m")
    cluster = Cluster(given, rules=Rules(settle=0.0), nodes=nodes)
    for _ in range(8):
        cluster.settle()
        cluster.pass_time(0.5)
        current = the_job(cluster).current
        if current and current.is_launched and current.kind == "train":
            return cluster
        cluster.work()
    raise AssertionError(f"is not launched: {the_job(cluster)}")


def the_job(cluster: Cluster) -> Job:
    return cluster.jobs["job_a"]


def test_one_line_is_short_for_a_list_and_the_bound_has_a_unit() -> None:
    fields = {"program": "own.py", "nodes": 1, "batch_size": 8, "steps": 9}
    spec = JobSpec.model_validate({**fields, "setup": "make data", "setup_timeout": "2m"})
    setup = setup_of(spec)
    assert setup is not None
    assert (setup.lines, setup.timeout_seconds) == (("make data",), 120.0)
    assert setup_of(JobSpec.model_validate(fields)) is None


def test_it_is_said_which_machines_are_set_up_and_when_it_is_over() -> None:
    cluster = launched()
    before = the_job(cluster).message
    cluster.enter(0, Phase.SETUP)
    cluster.settle()
    assert the_job(cluster).state is JobState.STARTING
    assert the_job(cluster).message == "Running `setup` (1 line) on vm-0."
    cluster.enter(0, Phase.BOOT)
    cluster.settle()
    assert the_job(cluster).message == before


def test_a_machine_that_is_set_up_has_its_own_time_and_the_launch_begins_after_it() -> None:
    cluster = launched()
    number = cluster.generation().number
    for rank in (0, 1):
        cluster.enter(rank, Phase.SETUP)
    cluster.pass_time(1500)
    cluster.settle()
    assert cluster.generation().number == number
    for rank in (0, 1):
        cluster.enter(rank, Phase.PROGRAM)
    cluster.pass_time(100)
    cluster.settle()
    assert cluster.generation().number == number
    for _ in range(2):  # its stacks are dumped, then it is ended
        cluster.pass_time(30)
        cluster.settle()
    assert "did not get past program in 2 m" in the_job(cluster).past[-1].because


def test_a_machine_that_never_comes_out_of_it_is_not_waited_for_for_ever() -> None:
    cluster = launched()
    cluster.enter(0, Phase.SETUP)
    for _ in range(2):
        cluster.pass_time(30 * 60 + 130)
        cluster.settle()
    assert "Rank 0 on vm-0 did not get past setup in 32 m" in the_job(cluster).past[-1].because


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_setup_that_fails_is_the_jobs_message_after_a_few_attempts(restarts: int) -> None:
    cluster = launched()
    cluster.jobs["job_a"] = cluster.with_spec(recovery={"max_restarts": restarts})
    for _ in range(restarts + 1):
        for rank in (0, 1):
            cluster.enter(rank, Phase.SETUP)
        for rank in (0, 1):
            said = f"rank {rank}: `setup` line 1 (pip install polars) ended with code 1: No network"
            cluster.fail(rank, ExitCode.SETUP_FAILED, said)
        cluster.settle()
        if the_job(cluster).state.is_over:
            break
        cluster.pass_time(60)
        cluster.settle()
        cluster.list_folder()
        cluster.pass_time(0.5)
        cluster.settle()
    assert the_job(cluster).state is JobState.FAILED
    assert the_job(cluster).reason is Reason.SETUP_FAILED
    assert "(pip install polars) ended with code 1: No network" in the_job(cluster).message
    assert f"Given up after {restarts + 1} attempt" in the_job(cluster).message
    assert all(node.state.value == "ready" for node in cluster.nodes.values())
