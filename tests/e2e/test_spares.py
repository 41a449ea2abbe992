"""A VM without a seat stands by with the job's program, and takes the seat of one that is lost."""

import psutil
import pytest

from controller.core.states import JobState
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def below(scene: Scene, name: str) -> set[psutil.Process]:
    """What was forked on node ``name``."""
    return set(scene.zygote_of(name).children(recursive=True))


def test_a_spare_takes_a_lost_seat_with_a_trainer_that_was_forked_before_and_nothing_stays(
    scene: Scene,
) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    until(lambda: len(scene.nodes()) == 3 or None, "three VMs")
    before = {name: below(scene, name) for name in ("vm-1", "vm-2", "vm-3")}
    scene.submit(1_000_000, nodes="2", plan={"depth": 2})
    shape = scene.running().shape
    (spare,) = set(before) - {seat.node for seat in scene.running().seats}
    until(lambda: scene.said(f"{spare} is ready to take a seat."), "a spare that is ready")
    standing_by = below(scene, spare) - before[spare]

    lost, left = (seat.node for seat in scene.running().seats)
    scene.kill(lost)
    scene.wait_for_recovery(1)
    assert scene.running().shape == shape
    assert {seat.node for seat in scene.running().seats} == {left, spare}
    (trainer,) = scene.trainers_of(spare)
    assert trainer in standing_by
    program = trainer.parent()
    assert program in standing_by and program != scene.zygote_of(spare)

    scene.act("cancel")
    scene.wait_for(JobState.CANCELLED)
    for name in (spare, left):
        until(lambda: below(scene, name) == before[name] or None, f"nothing left on {name}")  # noqa: B023
