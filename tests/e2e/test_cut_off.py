"""Agents are awake and do not reach the controller: the trainers' own links are whole."""

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from controller.chaos.links import Links
from controller.core.states import JobState
from tests.e2e.scene import LEISURELY, Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(400)]

SECONDS = 60.0


@pytest.fixture
def links(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """Between each agent and the controller."""
    port = urlsplit(scene.cluster.controller.place.url).port
    assert port
    with Links(lambda: port) as links:
        monkeypatch.setattr(scene.cluster.fleet, "way", links.url)
        yield links
        scene.clear()


def submit(scene: Scene, nodes: str) -> None:
    """A job that saves nothing, so that no marker ends what is void."""
    rarely = {"dir": str(scene.cluster.folder / "ckpt"), "every": "100000 steps"}
    scene.submit(1_000_000, nodes=nodes, checkpoint=rarely, **LEISURELY)
    scene.wait_for_step(8)


def test_who_is_back_after_a_minute_is_told_that_his_work_is_void_and_stops_it(
    scene: Scene, links: Links
) -> None:
    scene.add("vm-1", "vm-2")
    submit(scene, "1")
    away, first = scene.node_of_rank(0), scene.running().number
    (stale,) = scene.trainers_of(away)
    links.cut(away)
    recovery = scene.wait_for_recovery(1)
    second = scene.running()
    assert second.seats[0].node != away
    time.sleep(SECONDS)  # the scenario
    assert stale.is_running(), "nobody can tell it, and its work may yet be needed"
    links.mend(away)
    until(lambda: not stale.is_running() or None, "the void trainer to be gone")
    until(lambda: len(scene.nodes()) == 2 or None, "its node to be back")
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.running().number == second.number
    assert {c.step for c in scene.checkpoints() if c.generation == first} <= {0}
    assert scene.ledger().samples_committed_once


def test_a_run_whose_agents_are_all_cut_off_goes_on_and_is_taken_back(
    scene: Scene, links: Links
) -> None:
    scene.add("vm-1", "vm-2")
    submit(scene, "2")
    before = scene.job()
    trainers = {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)}
    for name in ("vm-1", "vm-2"):
        links.cut(name)
    waiting = scene.wait_for(JobState.WAITING)
    time.sleep(SECONDS / 2)  # the scenario
    for name in ("vm-1", "vm-2"):
        links.mend(name)
    after = scene.wait_for(JobState.RUNNING)
    scene.wait_for_step(waiting.step + 10)
    assert (after.generation, scene.recoveries()) == (before.generation, [])
    assert trainers == {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)}
    assert scene.ledger().samples_committed_once
