"""The controller is killed while a job runs: nobody stops training, and a new one takes it back."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest

from controller.core.states import JobState
from tests.e2e.scene import LEISURELY, Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

AWAY = 15.0
"""Three times ``lost_after``."""


def test_a_killed_controller_stops_nobody_and_a_new_one_re_adopts_the_job(scene: Scene) -> None:
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(100_000, nodes="2..4")
    before = scene.wait_for_step(12)
    running = scene.running()
    trainers = {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)}

    scene.cluster.kill_controller()
    scene.cluster.start_controller()

    after = scene.job()
    assert after.state is JobState.RUNNING and after.generation == before.generation
    scene.wait_for_step(after.step + 5)
    assert scene.running().seats[0].incarnation == running.seats[0].incarnation
    assert {p.pid for name in ("vm-1", "vm-2") for p in scene.trainers_of(name)} == trainers
    assert not scene.recoveries()
    assert scene.ledger().samples_committed_once


def test_steps_made_while_the_controller_was_away_are_known_when_it_is_back(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    before = scene.wait_for_step(12)
    scene.cluster.kill_controller()
    folder = scene.cluster.folder / "ckpt" / scene.job_id
    until(
        lambda: any(f"step-{s:06d}" in p.name for p in folder.iterdir()
                    for s in range(before.step + 10, before.step + 40)) or None,
        "a checkpoint that was written without a controller",
    )  # fmt: skip
    scene.cluster.start_controller()
    scene.wait_for_step(before.step + 10)
    assert scene.ledger().samples_committed_once


def test_a_node_lost_while_the_controller_was_away_is_seen_when_it_is_back(scene: Scene) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(100_000, nodes="2..3")
    scene.wait_for_step(12)
    victim = scene.node_of_rank(1)
    scene.cluster.kill_controller()
    scene.kill(victim)
    scene.cluster.start_controller()
    recovery = scene.wait_for_recovery(1)
    assert victim not in {seat.node for seat in scene.running().seats}
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.ledger().samples_committed_once


@pytest.mark.soak
def test_nobody_is_lost_to_a_controller_that_was_away_for_three_timeouts(scene: Scene) -> None:
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    scene.submit(1_000_000, nodes="4", **LEISURELY)
    before = scene.wait_for_step(12)
    trainers = {p.pid for seat in scene.running().seats for p in scene.trainers_of(seat.node)}
    scene.cluster.kill_controller()
    time.sleep(AWAY)
    scene.cluster.start_controller()
    steps, over = [before.step], time.monotonic() + AWAY
    while time.monotonic() < over:
        steps.append(scene.job().step)
        time.sleep(0.1)
    assert steps == sorted(steps)
    scene.wait_for_step(steps[-1] + 3)
    assert scene.recoveries() == []
    assert scene.running().number == before.generation
    assert trainers == {
        p.pid for seat in scene.running().seats for p in scene.trainers_of(seat.node)
    }
    assert scene.ledger().samples_committed_once


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
def test_trainers_that_died_while_the_controller_was_away_are_replaced_where_they_were(
    scene: Scene, ranks: tuple[int, ...]
) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    scene.wait_for_step(12)
    seats = scene.running().seats
    dead = [trainer for rank in ranks for trainer in scene.trainers_of(seats[rank].node)]
    scene.cluster.kill_controller()
    for trainer in dead:
        trainer.kill()
    scene.cluster.start_controller()
    recovery = scene.wait_for_recovery(1)
    scene.wait_for_step(recovery.at_step + 3)
    assert {(seat.node, seat.incarnation) for seat in scene.running().seats} == {
        (seat.node, seat.incarnation) for seat in seats
    }
    assert scene.ledger().samples_committed_once


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Others keep the disk busy."""
    folder.mkdir()
    copy = f"while :; do dd if=/dev/zero of={folder}/zeros bs=1M count=200 conv=fsync; done"
    with Popen(["sh", "-c", copy], stderr=DEVNULL, start_new_session=True) as busy:
        try:
            yield
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
    shutil.rmtree(folder)


@pytest.mark.parametrize("seconds", [0, pytest.param(30, marks=pytest.mark.soak)])
def test_a_name_that_the_killed_controller_knew_as_alive_is_taken_in_again(
    scene: Scene, tmp_path: Path, seconds: int
) -> None:
    """Nobody has closed its row. A disk that is busy for long costs nobody his."""
    scene.add("vm-1", "vm-2")
    scene.submit(1_000_000, nodes="2", **LEISURELY)
    scene.wait_for_step(3)
    before = {node.name: node.incarnation for node in scene.nodes()}
    with writing_in(tmp_path / "others") if seconds else nullcontext():
        time.sleep(seconds)
        assert scene.recoveries() == []
        scene.cluster.kill_controller()
        scene.kill("vm-2")
        scene.cluster.fleet.create(["vm-2"])
        scene.cluster.start_controller()
        recovery = scene.wait_for_recovery(1)
    after = {seat.node: seat.incarnation for seat in scene.running().seats}
    assert after["vm-1"] == before["vm-1"] and after["vm-2"] != before["vm-2"]
    assert sorted(node.name for node in scene.nodes()) == ["vm-1", "vm-2"]
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.ledger().samples_committed_once
