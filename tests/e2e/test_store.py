"""A job whose checkpoints are behind a URL: trainers write beside it, agents carry."""

from pathlib import Path

import pytest

from controller.core.states import JobState
from tests.e2e.scene import Scene
from trainer.contract.checkpoints import complete, newer_marker, scan

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_job_whose_checkpoints_are_in_a_store_loses_a_node_and_ends_well(scene: Scene) -> None:
    store: Path = scene.cluster.folder / "store"
    scene.add("vm-1", "vm-2", "vm-3")
    checkpoint = {"dir": f"file://{store}", "every": "5 steps", "keep": 2}
    scene.submit(60, nodes="2..3", checkpoint=checkpoint)
    scene.wait_for_step(12)
    scene.kill(scene.node_of_rank(1))
    scene.wait_for_recovery(1)
    job = scene.wait_for(JobState.SUCCEEDED)
    assert sorted(scene.losses()) == list(range(1, 61))
    assert scene.ledger().samples_committed_once
    listing = scan(store / job.id)
    assert listing.done is not None and listing.done.step == 60
    assert [c.step for c in complete(listing)][-1] == 60
    assert listing.skipped == () and newer_marker(store / job.id, 1), "markers are there too"
    staged = {path.name for path in scene.cluster.folder.rglob("staging/*/step-*")}
    assert len(staged) <= 2, "what is in the store is cleared away here"
