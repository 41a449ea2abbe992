"""A program that spoils a step, one that cannot be imported: what the job says, and how often."""

from itertools import pairwise

import pytest

from controller.api.schemas import JobView
from controller.core.states import JobState, Reason
from tests.e2e.scene import PROGRAMS, Scene, until
from trainer.contract.samples import sample_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BATCH, SEED, SAMPLES, STEP = 12, 5, 60, 3
SPOILT = sample_at((STEP - 1) * BATCH + 7, SAMPLES, SEED)


def paused_again(scene: Scene, before: int) -> JobView:
    def look() -> JobView | None:
        job = scene.job()
        tried = (job.generation or 0) > before and job.state in (JobState.PAUSED, JobState.FAILED)
        return job if tried else None

    return until(look, f"{scene.title} to be paused again")


def test_a_step_that_is_not_finite_pauses_the_job_and_the_third_time_ends_it(
    scene: Scene,
) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(
        40, nodes="2", program="spoilt.py", workdir=str(PROGRAMS), seed=SEED, batch_size=BATCH,
        args={"how": "loss", "sample": SPOILT},
        plan={"depth": 2, "micro_batch": 3},
    )  # fmt: skip
    paused = paused_again(scene, 1)
    assert (paused.state, paused.reason) == (JobState.PAUSED, Reason.NON_FINITE_LOSS)
    assert paused.step == STEP - 1
    assert f"is not finite at step {STEP} on replica 0" in paused.message
    assert f"Resume from step {paused.step:,}" in paused.message
    assert paused.last_checkpoint_step == paused.step
    assert paused.nodes.used == 0
    scene.act("resume")
    again = paused_again(scene, paused.generation or 0)
    assert again.reason is Reason.NON_FINITE_LOSS and again.step == paused.step
    scene.act("resume")
    over = paused_again(scene, again.generation or 0)
    assert (over.state, over.reason) == (JobState.FAILED, Reason.NON_FINITE_LOSS)
    assert f"The same 3 times at step {STEP}" in over.message
    assert scene.ledger().samples_committed_once


def test_a_program_that_cannot_be_imported_costs_two_launches(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(10, nodes="2", program="unimportable.py", workdir=str(PROGRAMS), args={})
    over = scene.wait_for(JobState.FAILED)
    assert over.reason is Reason.PROGRAM_ERROR
    assert "No module named 'a_package_that_nobody_has'" in over.message
    assert "The same 2 times" in over.message
    assert len([g for g in scene.generations() if g.launched_at]) == 2


@pytest.mark.soak
def test_a_program_that_is_gone_after_2_s_is_tried_four_times_ever_later_and_its_log_is_shown(
    scene: Scene,
) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(
        10, nodes="1", program="vanishing.py", workdir=str(PROGRAMS), args={},
        recovery={"max_restarts": 3},
    )  # fmt: skip
    over = scene.wait_for(JobState.FAILED)
    assert over.reason is Reason.PROGRAM_ERROR
    assert "exited with code 3" in over.message
    assert "Given up after 4 attempts without progress." in over.message
    assert "Its last lines: " in over.message and "the licence server is gone" in over.message
    tried = [g for g in scene.generations() if g.launched_at]
    pauses = [
        (then.created_at - before.ended_at).total_seconds()
        for before, then in pairwise(tried)
        if before.ended_at
    ]
    assert all(pause >= least for pause, least in zip(pauses, (1, 2, 4), strict=True)), pauses


@pytest.mark.soak
def test_a_program_that_gets_on_before_each_failure_comes_to_its_end(scene: Scene) -> None:
    """In each generation its eighth step fails; five of the seven before are saved."""
    scene.add("vm-1", "vm-2")
    scene.submit(
        22, nodes="2", program="breaking.py", workdir=str(PROGRAMS),
        args={"where": "step", "what": "value", "at": 8}, plan={"depth": 2},
        recovery={"max_restarts": 1},
        checkpoint={"dir": str(scene.cluster.folder / "ckpt"), "every": "5 steps"},
    )  # fmt: skip
    scene.wait_for(JobState.SUCCEEDED)
    assert [recovery.resumed_from for recovery in scene.recoveries()] == [5, 10, 15]
    assert all("enough of this" in recovery.because for recovery in scene.recoveries())
    assert scene.ledger().samples_committed_once
