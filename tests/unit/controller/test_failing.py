"""What happens when the program fails, or what it computes is not finite: each budget's rule."""

from dataclasses import replace

import pytest

from controller.core.states import GenerationState, JobState, Reason
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from trainer.contract.progress import ExitCode, NonFinite


def launched(nodes: int = 4, **spec: object) -> Cluster:
    """A cluster whose job has just been given seats to train, weights and costs being there."""
    cluster = Cluster(job(**spec), nodes=nodes)  # type: ignore[arg-type]
    for _ in range(40):
        cluster.settle()
        current = cluster.jobs["job_a"].current
        if current and current.kind == "train" and current.state is GenerationState.LAUNCHING:
            return cluster
        cluster.work()
        cluster.pass_time(2)
    raise AssertionError("it was not launched")


def running(nodes: int = 4, steps: int = 12, **spec: object) -> Cluster:
    """... and has done so many steps."""
    cluster = launched(nodes, **spec)
    cluster.step(steps=steps)
    cluster.settle()
    return cluster


def go_on(cluster: Cluster) -> None:
    """Until the job is seated again, or over, or paused."""
    for _ in range(60):
        cluster.settle()
        now = cluster.jobs["job_a"]
        if now.state.is_over or now.state is JobState.PAUSED:
            return
        if now.current and now.current.state is GenerationState.LAUNCHING:
            return
        if now.current:
            cluster.work()
        cluster.pass_time(2)
    raise AssertionError("nothing came of it")


def fail(cluster: Cluster, message: str = "rank 0: ValueError: no") -> None:
    """Every rank fails by the program's fault, as a deterministic error makes them."""
    for seat in cluster.generation().seats:
        cluster.fail(seat.rank, ExitCode.PROGRAM_ERROR, message)
    cluster.pass_time(5)
    go_on(cluster)


def spoil(cluster: Cluster, step: int) -> None:
    """Step ``step`` is not finite: nobody applies it, all stop after the one before, and save."""
    said = NonFinite(step=step, replica=1, stage=1, what="the loss of micro-batch 3")
    seats = cluster.generation().seats
    cluster._change_seat("job_a", len(seats) - 1, non_finite=said)
    cluster.settle()
    if cluster.jobs["job_a"].current is None:
        return
    cluster.save("job_a", step - 1)
    stopped = tuple(replace(seat, stopped=step - 1) for seat in cluster.generation().seats)
    cluster._change("job_a", seats=stopped)
    cluster.settle()


def resume(cluster: Cluster) -> None:
    cluster.pause(wanted=False)
    go_on(cluster)


# ---- not finite


def test_a_loss_that_is_not_finite_pauses_the_job_after_the_last_good_step() -> None:
    cluster = running(steps=12)
    spoil(cluster, step=13)
    now = cluster.jobs["job_a"]
    assert (now.state, now.reason) == (JobState.PAUSED, Reason.NON_FINITE_LOSS)
    assert now.message == (
        "The loss of micro-batch 3 is not finite at step 13 on replica 1."
        " Paused. Resume from step 12, or see the log."
    )
    assert not now.past[-1].charged


def test_resumed_it_goes_on_from_the_last_good_step() -> None:
    cluster = running(steps=12)
    spoil(cluster, step=13)
    resume(cluster)
    resumed = cluster.generation().resumed_from
    assert resumed and resumed.step == 12


def test_not_finite_twice_at_one_step_goes_a_checkpoint_further_back_and_a_third_time_ends_it() -> (
    None
):
    cluster = running(steps=12)
    spoil(cluster, step=13)
    resume(cluster)
    spoil(cluster, step=13)
    assert "Resume from step 10" in cluster.jobs["job_a"].message
    resume(cluster)
    resumed = cluster.generation().resumed_from
    assert resumed and resumed.step == 10
    cluster.step(steps=2)
    cluster.settle()
    spoil(cluster, step=13)
    over = cluster.jobs["job_a"]
    assert (over.state, over.reason) == (JobState.FAILED, Reason.NON_FINITE_LOSS)
    assert "The same 3 times at step 13" in over.message


def test_a_first_step_that_is_not_finite_pauses_too() -> None:
    cluster = launched()
    spoil(cluster, step=1)
    now = cluster.jobs["job_a"]
    assert (now.state, now.reason) == (JobState.PAUSED, Reason.NON_FINITE_LOSS)


# ---- the program's errors


def test_an_error_at_the_start_is_tried_once_more_and_elsewhere() -> None:
    """An ImportError will not go away: two launches, on two nodes, not four."""
    cluster = Cluster(job(recovery={"max_restarts": 9}), nodes=3)
    nodes = []
    for _ in range(2):
        go_on(cluster)
        nodes.append(cluster.generation().seats[0].node)
        fail(cluster, "rank 0: No module named 'foo'")
    over = cluster.jobs["job_a"]
    assert (over.state, over.reason) == (JobState.FAILED, Reason.PROGRAM_ERROR)
    assert "The same 2 times before the first step" in over.message
    assert len([g for g in over.past if g.launched]) == 2
    assert len(set(nodes)) == 2


def test_errors_at_the_start_that_differ_are_the_budgets_business() -> None:
    cluster = Cluster(job(recovery={"max_restarts": 3}), nodes=3)
    for words in ("one", "two", "three", "four"):
        go_on(cluster)
        assert not cluster.jobs["job_a"].state.is_over
        fail(cluster, words)
    assert "Given up after 4 attempts" in cluster.jobs["job_a"].message


def test_the_same_error_right_after_the_load_counts_as_one_at_that_step() -> None:
    """Generations that committed nothing of their own stand where they resumed from."""
    cluster = running(steps=10, recovery={"max_restarts": 9})
    for _ in range(3):
        fail(cluster)
        if cluster.jobs["job_a"].state.is_over:
            break
        resumed = cluster.generation().resumed_from
        while resumed and resumed.step < 10 and cluster.generation().committed < 10:
            cluster.step()
            cluster.settle()
    over = cluster.jobs["job_a"]
    assert over.state is JobState.FAILED
    assert "The same 3 times at step 11" in over.message


def test_errors_that_differ_at_one_step_are_not_the_same() -> None:
    cluster = running(steps=12, recovery={"max_restarts": 9})
    for words in ("one", "two", "three"):
        fail(cluster, words)
        resumed = cluster.generation().resumed_from
        assert resumed and resumed.step == 10, "nothing says that the checkpoint is at fault"
        cluster.step(steps=2)
        cluster.settle()


def test_a_lost_node_between_two_failures_does_not_make_them_differ() -> None:
    cluster = running(steps=12, recovery={"max_restarts": 9})
    fail(cluster)
    cluster.step(steps=2)
    cluster.settle()
    cluster.kill("vm-3")
    cluster.pass_time(3)
    go_on(cluster)
    cluster.step(steps=2)
    cluster.settle()
    fail(cluster)
    resumed = cluster.generation().resumed_from
    assert resumed and resumed.step == 0, "the second same failure: one checkpoint further back"


def test_an_error_after_progress_each_time_is_never_given_up() -> None:
    cluster = running(steps=12, recovery={"max_restarts": 1})
    for _ in range(5):
        fail(cluster)
        cluster.step(steps=13)
        cluster.settle()
    assert not cluster.jobs["job_a"].state.is_over


def test_a_final_failure_shows_the_last_lines_of_the_log() -> None:
    cluster = running(steps=12, recovery={"max_restarts": 0})
    for seat in cluster.generation().seats:
        cluster.exit(seat.rank, code=1, log_tail="first\nTraceback:\n  in f\nboom\n")
    cluster.pass_time(5)
    go_on(cluster)
    assert "Its last lines: Traceback: | in f | boom" in cluster.jobs["job_a"].message


# ---- what is nobody's fault


def test_sixty_evictions_are_never_charged() -> None:
    cluster = running(steps=12, recovery={"max_restarts": 0})
    for i in range(60):
        cluster.join(f"spare-{i}")
        victim = cluster.generation().seats[0].node
        cluster.kill(victim)
        cluster.pass_time(3)
        go_on(cluster)
        cluster.step(save_every=1)
        cluster.settle()
    assert not cluster.jobs["job_a"].state.is_over


@pytest.mark.parametrize(("said", "tries"), [("Permission denied", 2), ("Stale file handle", 6)])
def test_a_folder_that_may_not_be_written_is_not_tried_six_times(said: str, tries: int) -> None:
    cluster = Cluster(job(), nodes=3)
    nodes = []
    for _ in range(tries):
        go_on(cluster)
        assert not cluster.jobs["job_a"].state.is_over
        nodes.append(cluster.generation().seats[0].node)
        cluster.fail(0, ExitCode.CHECKPOINT_UNREACHABLE, f"rank 0: /ckpt: {said}")
        cluster.pass_time(40)
        cluster.settle()
    over = cluster.jobs["job_a"]
    assert (over.state, over.reason) == (JobState.FAILED, Reason.CHECKPOINT_UNREACHABLE)
    assert len(set(nodes)) == min(3, tries)


def test_not_finite_right_after_the_first_steps_loses_none_of_them() -> None:
    """Both are heard of before anybody has looked: it counts as running first."""
    cluster = launched()
    cluster.step(steps=2)
    spoil(cluster, step=3)
    now = cluster.jobs["job_a"]
    assert "Resume from step 2" in now.message
