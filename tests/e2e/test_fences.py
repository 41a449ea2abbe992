"""Who is no longer meant does no harm: a node that was stopped and wakes up generations later, one
that is cut off and trains on, an agent that is replaced before it is missed.
"""

import os
import signal
from pathlib import Path

import psutil
import pytest

from controller.cloud.port import Machine
from controller.core.states import GenerationState
from tests.e2e.scene import Scene, until
from trainer.contract.checkpoints import FolderName
from trainer.contract.listing import scan, to_resume

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHECKPOINT = {"every": "5 steps", "keep": 2}


def files_of(scene: Scene, generation: int) -> dict[Path, int]:
    """All that the generation has in the folder, and when it was written."""
    folders = [
        path
        for path in scene.root.iterdir()
        if (name := FolderName.parse(path.name)) and name.generation == generation
    ]
    found = [*(file for folder in folders for file in folder.iterdir()), *folders]
    return {path: path.stat().st_mtime_ns for path in found}


def stop_between_saves(scene: Scene, name: str) -> None:
    """Freeze the node when its trainer writes nothing: what is half done at a stop is finished at
    the next start, by any program.
    """

    def stopped() -> bool:
        scene.stop(name)
        generation = scene.running().number
        files = files_of(scene, generation)
        folders = [path for path in files if path.is_dir()]
        if folders and all(path / "part-0.json" in files for path in folders):
            return True
        scene.wake()
        return False

    until(lambda: stopped() or None, "a moment between two saves")


def test_neither_a_node_that_wakes_up_nor_one_that_is_cut_off_harms_what_came_after(
    scene: Scene,
) -> None:
    """Each holds the whole model, so nothing but the fence ends its training."""
    checkpoint = {"dir": str(scene.cluster.folder / "ckpt"), **CHECKPOINT}
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(100_000, nodes="1", checkpoint=checkpoint)
    scene.wait_for_step(12)
    asleep, first = scene.node_of_rank(0), scene.running().number
    (sleeper,) = scene.trainers_of(asleep)
    stop_between_saves(scene, asleep)
    scene.wait_for_recovery(1)

    second = scene.running()
    scene.wait_for_step(second.committed + 12)
    (cut_off,) = scene.trainers_of(second.seats[0].node)
    os.kill(scene.pid_of(second.seats[0].node), signal.SIGSTOP)
    scene.stopped.append(scene.pid_of(second.seats[0].node))
    scene.wait_for_recovery(2)
    third = scene.running()
    until(lambda: not is_there(cut_off) or None, "the marker to end who nobody could tell")

    left = files_of(scene, first), files_of(scene, second.number)
    scene.wake()
    until(lambda: len(scene.nodes()) == 3 or None, "the nodes to be back")
    until(lambda: not is_there(sleeper) or None, "the trainer of long ago to be gone")
    scene.wait_for_step(scene.job().step + 15)
    until(
        lambda: (chosen := to_resume(scan(scene.root))) and chosen.generation == third.number,
        "a checkpoint of the third to be the one to go on from",
    )
    now = files_of(scene, first), files_of(scene, second.number)
    assert now[0].items() <= left[0].items(), "who woke up has written"
    assert now[1].items() <= left[1].items()
    assert scene.running().number == third.number
    assert scene.running().state is GenerationState.RUNNING
    assert scene.ledger().samples_committed_once


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_an_agent_that_is_back_before_it_is_missed_ends_what_outlived_the_one_before(
    scene: Scene,
) -> None:
    """Its chain of death was broken: the zygote stood still when the agent was killed."""
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    scene.wait_for_step(12)
    before = scene.running()
    zygote, orphans = scene.zygote_of("vm-2"), scene.trainers_of("vm-2")
    assert orphans
    zygote.send_signal(signal.SIGSTOP)
    scene.stopped.append(zygote.pid)
    psutil.Process(scene.pid_of("vm-2")).kill()
    until(lambda: Machine("vm-2", "gone") in scene.cluster.fleet.list() or None, "its death")
    scene.add("vm-2")
    recovery = scene.wait_for_recovery(1)
    assert not any(map(is_there, orphans)), "two write the same folder"
    assert scene.running().number > before.number
    scene.wait_for_step(recovery.at_step + 5)
    assert scene.ledger().samples_committed_once
