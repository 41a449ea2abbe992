"""Many nodes at once: one decision, not one each."""

from pathlib import Path

import pytest

from controller.api.schemas import GenerationView, NodeView, Page
from controller.store.tokens import Role
from tests.fakes.agents import Fleet
from tests.fakes.served import served
from tests.fakes.waiting import until
from tests.integration.test_controller_life import items, job, ledger, submit

pytestmark = [pytest.mark.integration, pytest.mark.soak]

NAMES = [f"vm-{number}" for number in range(1, 33)]
SECONDS = 60.0


def test_thirty_of_32_nodes_are_lost_then_all_then_32_are_back(tmp_path: Path) -> None:
    """One re-plan; then the job waits; then one launch."""
    with (
        served(tmp_path, lost_after=5.0, suspect_after=2.0, coalesce=0.3) as controller,
        Fleet(controller.url, controller.token(Role.AGENT), step_seconds=0.1) as fleet,
        controller.client(Role.USER) as user,
    ):
        fleet.beat_seconds = 1.0

        def launched() -> list[GenerationView]:
            found: list[GenerationView] = items(user, "generations", GenerationView)
            return [g for g in found if g.kind == "train" and g.launched_at]

        def live() -> int:
            answer = user.get("/api/v1/nodes")
            return len(Page[NodeView].model_validate_json(answer.content).items)

        fleet.add(*NAMES)
        submit(user, tmp_path, nodes="1..32", batch_size=128, steps=10_000, plan={"micro_batch": 2})
        until(lambda: job(user).step >= 12, SECONDS)
        (first,) = launched()
        assert len(first.seats) > 16

        fleet.kill(*NAMES[:30])
        until(lambda: len(launched()) == 2 and job(user).state == "running", SECONDS)
        after = launched()[-1]
        assert {seat.node for seat in after.seats} <= set(NAMES[30:])
        assert job(user).recoveries == 1
        until(lambda: live() == 2, SECONDS)
        step = job(user).step
        until(lambda: job(user).step > step, SECONDS)
        assert len(launched()) == 2, [g.because for g in launched()]

        fleet.kill(*NAMES[30:])
        until(lambda: job(user).state == "waiting", SECONDS)
        assert "0 of at least 1 ready" in job(user).message

        fleet.add(*NAMES, incarnation="second-life")
        until(lambda: job(user).state == "running", SECONDS)
        assert len(launched()) == 3, [g.because for g in launched()]
        step = job(user).step
        until(lambda: job(user).step > step, SECONDS)
        assert ledger(user).samples_committed_once
