"""A whole trace of spot VMs, played to a controller at sixty times its speed: what is taken from a
job is never held against its program.
"""

import time
from pathlib import Path

import pytest

from controller.api.schemas import GenerationView, RecoveryView
from controller.core.states import JobState, Reason
from controller.planner.trace import read_trace
from controller.store.tokens import Role
from tests.fakes.agents import Fleet
from tests.fakes.served import served
from tests.fakes.waiting import until
from tests.integration.test_controller_life import items, job, ledger, submit
from tests.unit.controller.planner.pipelines import DATA

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1200)]

SPEED = 60.0
MAX_RESTARTS = 3
TRACE = DATA / "oobleck_p3_scaled.csv"
"""AWS p3 over 11.4 hours, at 85 moments of which some of 15 to 30 VMs were taken."""


def test_no_loss_of_a_day_on_spot_vms_is_charged_to_the_program(tmp_path: Path) -> None:
    changes = read_trace(TRACE.read_text())
    losses = sum(bool(change.left) for change in changes)
    assert losses > 80
    with (
        served(tmp_path, lost_after=5.0, suspect_after=2.0, coalesce=0.3) as controller,
        Fleet(controller.url, controller.token(Role.AGENT), step_seconds=0.5) as fleet,
        controller.client(Role.USER) as user,
    ):
        fleet.beat_seconds = 1.0
        began = time.monotonic()
        for change in changes:
            time.sleep(max(0.0, began + change.at / SPEED - time.monotonic()))  # the scenario
            fleet.add(*change.joined)
            fleet.kill(*change.left)
            if change is changes[0]:
                submit(
                    user, tmp_path, nodes="1..32", batch_size=128, steps=1_000_000,
                    plan={"micro_batch": 2}, recovery={"max_restarts": MAX_RESTARTS},
                )  # fmt: skip
            assert not job(user).state.is_over, job(user).message
        until(lambda: job(user).state is JobState.RUNNING, 60)
        step = job(user).step
        until(lambda: job(user).step > step, 60)
        ended = {g.end_reason for g in items(user, "generations?limit=1000", GenerationView)}
        assert Reason.PROGRAM_ERROR not in ended and Reason.NODE_LOST in ended
        recovered = items(user, "recoveries?limit=1000", RecoveryView)
        print(f"{losses} moments of loss, {len(recovered)} recoveries, step {step}")
        assert len(recovered) > MAX_RESTARTS, "the losses met spares, or each other"
        assert ledger(user).samples_committed_once
