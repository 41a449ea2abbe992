"""How often to save, where nobody says it: from a save's cost and the losses so far."""

from dataclasses import replace
from typing import Any

import pytest

from controller.core.actions import SaveEvery
from controller.core.period import UNMEASURED, period_of
from controller.core.states import Reason
from controller.core.world import EndedGeneration, Job, SaveCost
from tests.unit.controller.builders import job
from tests.unit.controller.test_failing import running

HOUR = 3600.0


def lost(times: int) -> tuple[EndedGeneration, ...]:
    return tuple(
        EndedGeneration(
            number=i + 2, kind="train", resumed_from=None, committed=i + 1, charged=False,
            ended_at=0.0, launched=True, reason=Reason.NODE_LOST,
        )
        for i in range(times)
    )  # fmt: skip


def trained(stall: float, write: float = 0.1, losses: int = 0, **more: Any) -> Job:
    return replace(
        job(), save_cost=SaveCost(stall, write), past=lost(losses), trained_since=1000.0, **more
    )


@pytest.mark.parametrize(
    ("stall", "write", "losses", "hours", "seconds"),
    [
        (0.05, 0.1, 0, 0.0, 19),  # sqrt(2 x 0.05 x 3600)
        (0.05, 0.1, 3, 3.0, 19),  # an hour between losses, as was thought
        (0.05, 0.1, 15, 0.0, 5),  # one in four minutes; not below the shortest
        (0.2, 30.0, 3, 0.0, 60),  # writing takes half a minute
        (2.0, 1.0, 0, 9.0, 379),
        (50.0, 60.0, 0, 99.0, 900),  # not above the longest
    ],
)
def test_the_period_is_the_root_of_twice_the_cost_times_what_lies_between_losses(
    stall: float, write: float, losses: int, hours: float, seconds: float
) -> None:
    found = period_of(trained(stall, write, losses), 1000.0 + hours * HOUR)
    assert found and found.seconds == seconds


def test_the_sentence_has_the_formula_and_its_figures() -> None:
    found = period_of(trained(0.05), 1000.0)
    assert found and found.because == (
        "Saving every 19 s: the root of 2 × 0.05 s a save × 1 h between losses."
    )


def test_what_the_user_says_counts() -> None:
    said = replace(job(checkpoint={"dir": "/c", "every": "5m"}), save_cost=SaveCost(1.0, 1.0))
    assert period_of(said, 1000.0) is None


def test_a_launch_carries_the_period_and_a_running_generation_is_told_when_it_has_moved() -> None:
    cluster = running(steps=3)
    assert cluster.generation().save_every == UNMEASURED
    assert not cluster.decide()
    change = {"save_cost": SaveCost(0.05, 0.1), "trained_since": cluster.now}
    cluster.jobs["job_a"] = replace(cluster.jobs["job_a"], **change)  # type: ignore[arg-type]
    (decision,) = cluster.decide()
    (told,) = decision.actions
    assert isinstance(told, SaveEvery) and told.seconds == 19
    assert not cluster.decide(), "it is told once"
    change = {"save_cost": SaveCost(0.06, 0.1)}
    cluster.jobs["job_a"] = replace(cluster.jobs["job_a"], **change)  # type: ignore[arg-type]
    assert not cluster.decide(), "a tenth more is not worth an order"
