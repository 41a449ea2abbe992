"""The controller is killed again and again, at any moment of its jobs' lives: none fails of it."""

import random
import threading
import time
from contextlib import suppress

import pytest

from controller.api.schemas import JobView, LedgerView
from controller.client.rest import CliError, job_path
from controller.core.states import JobState
from tests.e2e.scene import LEISURELY, Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1500)]

KILLS = 20


def submit_whatever_happens(scene: Scene, name: str) -> None:
    """Until it is known to be accepted, as the CLI's user would, under one key."""
    spec = {
        "name": name, "nodes": "2..3", "batch_size": 16, "steps": 40, **LEISURELY,
        "checkpoint": {"dir": str(scene.cluster.folder / "ckpt"), "every": "10 steps"},
    }  # fmt: skip
    while True:
        with suppress(CliError, RuntimeError):  # a client that is closed meanwhile
            scene.cluster.controller.post("/api/v1/jobs", {"spec": spec}, JobView, key=name)
            return
        time.sleep(0.2)


def test_a_controller_that_is_killed_at_20_moments_fails_no_job(scene: Scene) -> None:
    chance = random.Random(14)
    scene.add("vm-1", "vm-2", "vm-3")
    names: list[str] = []
    for kill in range(KILLS):
        if not names or job(scene, names[-1]).state.is_over:
            names.append(f"killed-{kill}")
            submitting = threading.Thread(target=submit_whatever_happens, args=(scene, names[-1]))
            submitting.start()
            time.sleep(chance.choice((0.0, 0.05, chance.uniform(0, 6))))
        else:
            time.sleep(chance.uniform(0, 6))
        scene.cluster.kill_controller()
        time.sleep(chance.choice((0.0, 2.0)))
        scene.cluster.start_controller()
        submitting.join()
    for name in names:
        until(lambda name=name: job(scene, name).state.is_over or None, f"the end of {name}")  # type: ignore[misc]
        assert job(scene, name).state is JobState.SUCCEEDED, job(scene, name).message
        path = job_path(name, "/ledger")
        assert scene.cluster.controller.get(path, LedgerView).samples_committed_once
    assert len(scene.cluster.controller.all("/api/v1/jobs", JobView, all=True)) >= len(names) > 1


def job(scene: Scene, name: str) -> JobView:
    return scene.cluster.controller.get(job_path(name), JobView)
