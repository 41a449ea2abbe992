"""Checkpoints that are damaged or deleted by hand under a job: it is said, and it goes on."""

import shutil

import pytest

from controller.core.states import JobState
from tests.e2e.scene import Scene, until
from trainer.contract.listing import Checkpoint, complete, newer_marker, scan

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LAYER = "layer-002.*"


def saved(scene: Scene) -> tuple[Checkpoint, ...]:
    return complete(scan(scene.root))


def known(scene: Scene) -> list[Checkpoint]:
    """Those that the controller has heard of, too."""
    return [c for c in saved(scene) if scene.said(f"Checkpoint {c.folder} is complete")]


def test_damaged_checkpoints_are_named_and_the_one_before_them_is_used(scene: Scene) -> None:
    """The newest is truncated, which a listing sees; in the next a bit has flipped, which only who
    loads it sees.
    """
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    until(lambda: len(known(scene)) >= 4 or None, "checkpoints")
    scene.kill("vm-1", "vm-2")
    scene.wait_for(JobState.WAITING)
    for checkpoint in saved(scene):
        if checkpoint not in known(scene):  # the kill came before it was reported
            shutil.rmtree(scene.root / checkpoint.folder)
    *_, before, flipped, truncated = known(scene)
    (cut,) = (scene.root / truncated.folder).glob(LAYER)
    cut.write_bytes(cut.read_bytes()[:100])
    (other,) = (scene.root / flipped.folder).glob(LAYER)
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    scene.add("vm-3", "vm-4")
    recovery = scene.wait_for_recovery(1)
    assert recovery.resumed_from == before.step
    skipped = scene.said(f"Checkpoint {truncated.folder} is not used: {cut.name} has 100 bytes")
    assert skipped and skipped.type == "checkpoint_skipped"
    condemned = scene.said(f"{flipped.folder}/{other.name} has another content than was written")
    assert condemned is not None
    scene.wait_for_step(recovery.at_step + 5)
    assert scene.ledger().samples_committed_once


def test_a_folder_deleted_by_hand_while_training_costs_nothing_that_is_in_memory(
    scene: Scene,
) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(100_000, nodes="2..3", checkpoint={
        "dir": str(scene.cluster.folder / "ckpt"), "every": "5 steps", "keep": 2,
    })  # fmt: skip
    scene.wait_for_step(12)
    gone = scene.root.rename(scene.root.with_name("gone"))
    shutil.rmtree(gone)
    deleted_at = scene.job().step
    until(lambda: [c for c in saved(scene) if c.step > deleted_at] or None, "a new checkpoint")
    assert newer_marker(scene.root, 0) == scene.running().number, "the fence is gone"
    assert scene.recoveries() == []
    scene.kill(scene.node_of_rank(1))
    recovery = scene.wait_for_recovery(1)
    assert recovery.resumed_from is not None and recovery.resumed_from > deleted_at
    scene.wait_for_step(recovery.at_step + 5)
    assert scene.ledger().samples_committed_once
