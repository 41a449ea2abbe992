"""A disk that is really full: a small one in memory, which only root may mount."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.jobs import Job
from tests.fakes.trainers import Generation, Trainers
from trainer.contract.listing import complete, scan
from trainer.contract.progress import PartWritten, SaveFailed
from trainer.contract.spec import Saving

pytestmark = pytest.mark.integration


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for a few checkpoints."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "varuna-test", str(place)]
    if (mounted := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_stops_no_step_and_saves_go_on_when_there_is_room(
    trainers: Trainers, disk: Path
) -> None:
    job = Job(trainers, disk / "job")
    run = job.start("2x1", saving=Saving(root=str(job.root), every_steps=1))
    trainers.wait(run, lambda g: all(rank.all(SaveFailed) for rank in g.ranks))
    assert any("No space left" in failed.message for failed in failures(run))
    assert complete(scan(job.root)), "nothing was saved before the disk was full"
    reached = [len(rank.steps) for rank in run.ranks]
    trainers.wait(
        run, lambda g: all(len(r.steps) > n + 20 for r, n in zip(g.ranks, reached, strict=True))
    )
    *_, newest = complete(scan(job.root))
    for path in job.root.glob("step-*"):
        if path.name != newest.folder:
            shutil.rmtree(path)
    full_until = run.ranks[0].steps[-1].step
    trainers.wait(
        run, lambda g: all(any(p.step > full_until for p in r.all(PartWritten)) for r in g.ranks)
    )
    job.leave(run)
    assert complete(scan(job.root))[-1].step > full_until


def failures(run: Generation) -> list[SaveFailed]:
    return [failed for rank in run.ranks for failed in rank.all(SaveFailed)]
