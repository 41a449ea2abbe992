"""VMs come and go faster than a job can make a checkpoint: it gets on all the same."""

import time

import pytest

from tests.e2e.scene import Scene

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

EVERY_SECONDS, CHANGES = 20.0, 9


def test_a_change_every_20_s_with_a_checkpoint_every_15_s_leaves_a_job_that_gets_on(
    scene: Scene,
) -> None:
    """For three minutes, in turn a VM is lost and one comes; the steps that count only grow."""
    scene.add("vm-1", "vm-2", "vm-3", "vm-4")
    checkpoint = {"dir": str(scene.cluster.folder / "ckpt"), "every": "15s", "keep": 3}
    scene.submit(1_000_000, nodes="1..4", checkpoint=checkpoint)
    reached = scene.wait_for_step(5).step
    for change in range(CHANGES):
        began = time.monotonic()
        if change % 2 == 0:
            scene.kill(victim := scene.node_of_rank(change % len(scene.running().seats)))
        else:
            scene.add(victim)
        time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - began)))  # the scenario
        step = scene.job().step
        assert step > reached, f"after change {change + 1} it stood at {step}, then {reached}"
        reached = step
    assert scene.ledger().samples_committed_once
    assert len(scene.recoveries()) >= CHANGES // 2
