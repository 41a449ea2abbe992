"""A job whose checkpoints are behind a URL: trainers write beside it, agents carry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.states import JobState
from tests.e2e.scene import Scene, until
from tests.fakes.stores import azurite
from trainer.contract.checkpoints import complete
from trainer.contract.remote import remote_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(params=["file", "abfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
    else:
        with azurite(tmp_path) as url:
            yield url


def test_a_job_whose_checkpoints_are_in_a_store_loses_a_node_and_ends_well(
    scene: Scene, url: str
) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    scene.submit(60, nodes="2..3", checkpoint={"dir": url, "every": "5 steps", "keep": 2})
    scene.wait_for_step(12)
    victim = scene.node_of_rank(1)
    scene.kill(victim)
    scene.wait_for_recovery(1)
    job = scene.wait_for(JobState.SUCCEEDED)
    assert sorted(scene.losses()) == list(range(1, 61))
    assert scene.ledger().samples_committed_once
    remote = remote_at(f"{url}/{job.id}")

    def closed() -> bool:
        return remote.listing().done is not None

    until(lambda: closed() or None, "the job's folder to be closed")
    listing = remote.listing()
    assert [c.step for c in complete(listing)][-1] == 60
    assert listing.skipped == () and remote.newer_marker(1), "markers are there too"
    staged = scene.cluster.folder.rglob(f"staging/{job.id}/step-*")
    left = {path.name for path in staged if victim not in path.parts}
    assert left == {"step-000060.g3"}, "what is in the store is cleared away here"


def test_a_store_that_takes_nothing_is_said_and_never_stops_the_training(
    scene: Scene, tmp_path: Path
) -> None:
    scene.add("vm-1", "vm-2")
    checkpoint = {"dir": f"file://{tmp_path}/store", "every": "5 steps", "keep": 2}
    job = scene.submit(100_000, nodes="2", checkpoint=checkpoint)
    scene.wait_for_step(12)
    there, aside = tmp_path / "store" / job.id, tmp_path / "aside"
    there.rename(aside)
    there.write_text("in the way")
    failed = until(lambda: scene.said("is not in the store yet"), "the failure to be said")
    step = scene.job().step
    scene.wait_for_step(step + 20)
    assert scene.recoveries() == []
    there.unlink()
    aside.rename(there)
    remote = remote_at(f"file://{there}")
    until(
        lambda: [c for c in complete(remote.listing()) if c.step > step] or None,
        f"a checkpoint after that of {failed.message}",
    )
