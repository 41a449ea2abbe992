"""A job whose checkpoints are behind a URL: trainers write beside it, agents carry."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controller.core.states import JobState
from tests.e2e.scene import MODEL, Scene, until
from tests.fakes.stores import azurite
from trainer.contract.listing import complete
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
    scene: Scene, url: str, tmp_path: Path
) -> None:
    scene.add("vm-1", "vm-2", "vm-3")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 100)
    scene.submit(60, nodes="2..3", checkpoint={"dir": url, "every": "5 steps", "keep": 2},
                 args=MODEL | {"text": str(text)}, evaluate_every=20)  # fmt: skip
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
    newest = complete(listing)[-1]
    assert left == {newest.folder}, "what is in the store is cleared away here"
    evaluated = [(one.step, one.samples) for one in scene.series().evaluations]
    assert evaluated == [(20, 39), (40, 39), (60, 39)]
    assert job.evaluation is not None and job.evaluation.step == 60
    remote.fetch(f"curves/g{newest.generation}/evaluations.csv", tmp_path / "curve")
    assert (tmp_path / "curve").read_text().splitlines()[-1].startswith("60,")


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


@pytest.mark.parametrize(
    "seconds",
    [0, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(600)])],
    ids=["for a while", "for 40 s"],
)
def test_a_store_that_stands_still_is_said_and_never_stops_the_training(
    scene: Scene, tmp_path: Path, seconds: float
) -> None:
    with azurite(tmp_path) as url:
        ours = (p for p in psutil.Process().children() if "azurite" in " ".join(p.cmdline()))
        emulator = max(ours, key=psutil.Process.create_time)
        scene.add("vm-1", "vm-2")
        checkpoint = {"dir": url, "every": "5 steps", "keep": 2}
        job = scene.submit(100_000, nodes="2", checkpoint=checkpoint)
        remote = remote_at(f"{url}/{job.id}")
        until(lambda: len(complete(remote.listing())) > 1 or None, "a checkpoint in the store")
        emulator.suspend()
        until(lambda: scene.said("the one before is still on its way"), "it to be said")
        if seconds:
            time.sleep(seconds)  # the scenario
            assert scene.said("the store has not answered within 30 s")
        step = scene.job().step
        scene.wait_for_step(step + 20)
        assert scene.recoveries() == []
        emulator.resume()
        until(
            lambda: [c for c in complete(remote.listing()) if c.step > step + 20] or None,
            "a checkpoint of after the stall",
        )
        scene.act("cancel")
        scene.wait_for(JobState.CANCELLED)
