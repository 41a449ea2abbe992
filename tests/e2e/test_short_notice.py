"""A VM is told that it goes in 5 s while its trainer is at something that takes long. It holds
layers that nobody else has, so what is not saved in time is lost.
"""

import time
from pathlib import Path

import psutil
import pytest

from controller.api.schemas import GenerationView, RecoveryView
from controller.core.states import JobState
from tests.e2e.scene import PROGRAMS, Scene, until
from trainer.contract.progress import Phase

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]

NOTICE = 5.0


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Says what is slow, from when it is written on."""
    return tmp_path / "slow"


def two_stages_and_a_spare(
    scene: Scene, slow: Path, every: str = "100000 steps", **more: object
) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    until(lambda: len(scene.nodes()) == 3 or None, "three VMs")
    scene.submit(
        100_000, nodes="2..3", program="laden.py", workdir=str(PROGRAMS), args={"slow": str(slow)},
        plan={"depth": 2, "micro_batch": 4},
        checkpoint={"dir": str(scene.cluster.folder / "ckpt"), "every": every, "keep": 99}, **more,
    )  # fmt: skip
    scene.wait_for_step(4)
    assert str(scene.running().shape) == "2x1"


def until_in(scene: Scene, phase: Phase) -> str:
    """Until both ranks are in ``phase``; the second one's node."""

    def look() -> str | None:
        seats = scene.generations()[-1].seats
        is_there = len(seats) == 2 and all(seat.phase == phase for seat in seats)
        return seats[1].node if is_there else None

    return until(look, f"both ranks to be in {phase}")


def take(scene: Scene, name: str) -> None:
    """Tell the VM; it is there for as long as it was told, and until it is empty."""
    family = scene.zygote_of(name).children(recursive=True)
    scene.cluster.fleet.notice(name, NOTICE)
    told = time.monotonic()
    until(lambda: without(scene, name), f"a launch without {name}", 60)
    time.sleep(max(0.0, told + NOTICE - time.monotonic()))  # the scenario
    scene.kill(name)
    until(lambda: not any(map(psutil.Process.is_running, family)) or None, "all of it to be gone")


def without(scene: Scene, name: str) -> GenerationView | None:
    newest = scene.generations()[-1]
    is_one = newest.launched_at and name not in {seat.node for seat in newest.seats}
    return newest if is_one else None


def recovered(scene: Scene, slow: Path) -> RecoveryView:
    """It goes on from a complete checkpoint, and what it says was lost was."""
    slow.unlink()
    recovery = scene.wait_for_recovery(1)
    assert recovery.resumed_from is not None
    assert recovery.lost_steps == recovery.at_step - recovery.resumed_from
    assert recovery.resumed_from in {c.step for c in scene.checkpoints() if c.complete}
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.ledger().samples_committed_once
    return recovery


def test_in_the_first_step_nothing_is_saved_for_nothing_is_there_to_save(
    scene: Scene, slow: Path
) -> None:
    two_stages_and_a_spare(scene, slow)
    scene.act("pause")
    paused = scene.wait_for(JobState.PAUSED)
    slow.write_text("samples 1")
    scene.act("resume")
    take(scene, until_in(scene, Phase.FIRST_STEP))
    slow.unlink()
    scene.wait_for_step(paused.step + 3)
    link = scene.running().resumed_from
    assert link is not None and link.step == paused.step
    assert scene.ledger().samples_committed_once


def test_an_evaluation_is_cut_short_and_the_step_before_it_is_saved(
    scene: Scene, slow: Path
) -> None:
    """It would take minutes."""
    two_stages_and_a_spare(scene, slow, evaluate_every=10)
    slow.write_text("held out 0.2")
    take(scene, until_in(scene, Phase.EVALUATION))
    recovery = recovered(scene, slow)
    assert (recovery.at_step % 10, recovery.lost_steps) == (0, 0)
    assert "survivors saved step" in recovery.because


def test_while_samples_are_slow_to_come_the_last_step_is_saved(scene: Scene, slow: Path) -> None:
    two_stages_and_a_spare(scene, slow)
    slow.write_text("samples 0.1")
    (trainer,) = scene.trainers_of(scene.node_of_rank(1))
    assert len(trainer.children()) == 2, "which fetch its samples"
    take(scene, scene.node_of_rank(1))
    assert recovered(scene, slow).lost_steps == 0


def test_a_checkpoint_that_is_being_written_is_not_gone_on_from(scene: Scene, slow: Path) -> None:
    """Two seconds for each of them: the next may come in time or not."""
    two_stages_and_a_spare(scene, slow, every="3 steps")
    slow.write_text("disk 0.5")
    until(lambda: list(scene.root.glob("step-*/.*")) or None, "a file that is being written")
    take(scene, scene.node_of_rank(1))
    recovered(scene, slow)
