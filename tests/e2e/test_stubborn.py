"""Programs whose children will not go: nothing of them outlives their trainer, however it ends."""

import os
from collections.abc import Iterator

import psutil
import pytest

from controller.api.schemas import BundleView
from controller.client.pack import pack
from controller.core.states import JobState
from tests.e2e.scene import Scene, until
from tests.fakes.trainers import PROGRAMS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = f"stub-{os.getpid()}"
A_TRAINERS = 3
"""Children that stay."""


def family() -> set[int]:
    """Every one of them that lives, whoever its parent is."""
    return {one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == NAME}


def zombies(scene: Scene) -> Iterator[psutil.Process]:
    """The dead that nobody of this cluster has collected."""
    scene.cluster.fleet.list()  # a look at the agents, whose parent is this very process
    for one in psutil.Process().children(recursive=True):
        if one.is_running() and one.status() == psutil.STATUS_ZOMBIE:
            yield one


def a_round(scene: Scene, number: int = 0) -> None:
    """A trainer is killed, then an agent, then the job is cancelled."""
    scene.add("vm-1", "vm-2")
    bundle = pack(PROGRAMS, "stubborn.py")
    path = f"/api/v1/bundles/{bundle.digest}"
    scene.cluster.controller.put(path, bundle.content, BundleView)
    scene.submit(
        100_000, name=f"stubborn-{number}", nodes="1..2", program="stubborn.py", workdir=".",
        bundle=bundle.digest, args={"name": NAME},
    )  # fmt: skip
    scene.wait_for_step(5)
    first = until(there, "the trainer's children")
    scene.trainers_of(scene.node_of_rank(0))[-1].kill()
    scene.wait_for_recovery(1)
    until(lambda: not first & family() or None, "the killed trainer's children to be gone")

    second = until(there, "the next one's children")
    psutil.Process(scene.pid_of(scene.node_of_rank(0))).kill()
    scene.wait_for_recovery(2)
    until(lambda: not second & family() or None, "the killed agent's to be gone")

    until(there, "the last one's children")
    scene.act("cancel")
    scene.wait_for(JobState.CANCELLED)
    until(lambda: not family() or None, "all to be gone")
    until(lambda: not list(zombies(scene)) or None, "the dead to be collected")


def there() -> set[int] | None:
    """A trainer's whole family, when it is."""
    found = family()
    return found if len(found) >= A_TRAINERS else None


def test_children_that_will_not_go_end_with_a_restart_an_eviction_and_a_cancellation(
    scene: Scene,
) -> None:
    a_round(scene)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_rounds_of_children_that_will_not_go_leave_nothing(scene: Scene) -> None:
    for number in range(10):
        a_round(scene, number)
