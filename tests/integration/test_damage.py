"""Checkpoints that are wrong, or not there: real trainers load them. What is wrong is named and
condemned; what is missing is looked for again; nobody waits for the one who failed.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.jobs import Job
from tests.fakes.standing import stands_still
from tests.fakes.trainers import Generation, Trainers
from tests.fakes.waiting import until
from trainer.contract.checkpoints import part_file, write_json, write_marker
from trainer.contract.listing import OTHER_CONTENT, complete, read_folder, scan, to_resume
from trainer.contract.progress import (
    ExitCode,
    Failed,
    Leave,
    PartWritten,
    Phase,
    PhaseBegun,
    SaveFailed,
)
from trainer.contract.spec import ResumedFrom, Saving

pytestmark = pytest.mark.integration

LAYER = "layer-004.r1.safetensors"
PART = "part-1.json"
NUMBERS = itertools.count(4)
"""Of generations: they never come back, whatever becomes of the folder."""


@pytest.fixture(scope="module")
def pristine(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two generations ran as 2×1, to step 2 and to step 3."""
    job = Job(trainers, tmp_path_factory.mktemp("damage") / "job")
    for steps in (2, 3):
        run = job.start("2x1", step=None, steps=steps)
        assert trainers.wait(run).codes == [0, 0]
    found = [one.folder for one in complete(scan(job.root))]
    assert found == ["step-000000.g1", "step-000002.g2", "step-000003.g3"]
    shutil.copytree(job.root, job.root.with_name("as it was"))
    return job


@pytest.fixture
def job(pristine: Job) -> Job:
    """As it was, whatever the test before has done to it."""
    shutil.rmtree(pristine.root)
    shutil.copytree(pristine.root.with_name("as it was"), pristine.root)
    return pristine


@pytest.fixture
def saved(job: Job) -> Path:
    """The newest checkpoint's folder."""
    return job.root / "step-000003.g3"


def start(job: Job, **more: object) -> Generation:
    """Two ranks load step 3, of which the second has layers 3 to 5."""
    resumed = ResumedFrom(step=3, generation=3, folder="step-000003.g3")
    load_from = str(job.root / resumed.folder)
    about = {"load_from": load_from, "resumed_from": resumed, "generation": next(NUMBERS)}
    return job.start("2x1", steps=5, **about, **more)


def first_failure(job: Job, run: Generation) -> Failed:
    """Who fails is gone at once, and nobody waits for it."""

    def is_alone(run: Generation) -> bool:
        gone = [rank for rank in run.ranks if rank.exit]
        return bool(gone) and all(rank.exit or stands_still(rank) for rank in run.ranks)

    job.trainers.wait(run, is_alone, seconds=30)
    run.order(Leave())
    job.trainers.wait(run)
    failed = [line for rank in run.ranks for line in rank.all(Failed)]
    assert {line.code for line in failed} <= set(run.codes) <= {ExitCode.LEFT, failed[0].code}
    first = failed[0]
    assert isinstance(first, Failed)
    return first


# --- Wrong


def flip(folder: Path) -> None:
    content = bytearray((folder / LAYER).read_bytes())
    content[-1] ^= 1
    (folder / LAYER).write_bytes(content)


def mix(folder: Path) -> None:
    before = folder.with_name("step-000002.g2") / LAYER
    assert before.stat().st_size == (folder / LAYER).stat().st_size
    shutil.copy(before, folder / LAYER)


def truncate(folder: Path) -> None:
    with (folder / LAYER).open("r+b") as file:
        file.truncate(100)


def empty(folder: Path) -> None:
    (folder / PART).write_bytes(b"")


def mix_parts(folder: Path) -> None:
    shutil.copy(folder.with_name("step-000002.g2") / PART, folder / PART)


def claim_a_seventh_layer(folder: Path) -> None:
    for part in read_folder(folder)[0]:
        last, name = part.files[-1], f"layer-006.r{part.rank}.safetensors"
        shutil.copy(folder / last.name, folder / name)
        more = (*part.files, last.model_copy(update={"layer": 6, "name": name}))
        boast = part.model_copy(update={"layer_count": 7, "files": more})
        write_json(folder / part_file(part.rank), boast)


@pytest.mark.parametrize(
    ("damage", "file", "reason", "is_seen"),
    [
        (flip, LAYER, OTHER_CONTENT, False),
        (mix, LAYER, OTHER_CONTENT, False),
        (truncate, LAYER, "has 100 bytes instead of", True),
        (empty, PART, "is empty", True),
        (mix_parts, PART, "is rank 1's of step-000002.g2", True),
        (claim_a_seventh_layer, "part-0.json", "is of a model with 7 layers, not 6", False),
    ],
)
def test_what_is_wrong_is_named_and_what_a_listing_sees_is_never_chosen(
    job: Job, saved: Path, damage: Callable[[Path], None], file: str, reason: str, is_seen: bool
) -> None:
    damage(saved)
    failed = first_failure(job, start(job))
    assert failed.code == ExitCode.CHECKPOINT_DAMAGED
    assert failed.file == str(saved / file)
    assert reason in failed.message
    chosen = to_resume(scan(job.root))
    assert chosen is not None and (chosen.step == 2) == is_seen


def test_what_an_interrupted_save_leaves_is_no_damage(job: Job, saved: Path) -> None:
    for name in (f".{LAYER}.77.tmp", ".part-1.json.77.tmp", "layer-004.r7.safetensors"):
        (saved / name).write_bytes(b"half a la")
    (job.root / "step-000009.g3").mkdir()
    (job.root / "step-000009.g3" / LAYER).write_bytes(b"half a la")
    assert job.trainers.wait(start(job)).codes == [0, 0]


def test_a_marker_of_a_step_that_is_not_there_leaves_the_one_before_it(
    job: Job, saved: Path
) -> None:
    write_marker(job.root, 4, ResumedFrom(step=9, generation=3, folder="step-000009.g3"))
    chosen = to_resume(scan(job.root))
    assert chosen is not None and chosen.folder == saved.name


# --- Not there


def test_a_file_that_comes_late_is_waited_for(job: Job, saved: Path) -> None:
    """Or a part, or the whole folder: a mount that is late, say."""
    aside = job.root / "aside"
    for name in (LAYER, PART, ""):
        (saved / name).rename(aside)
        run = start(job, load_seconds=60.0)
        waiting = run.ranks[1].log
        until(lambda log=waiting: "Looking again" in log.read_text(), 30)  # type: ignore[misc]
        aside.rename(saved / name)
        assert job.trainers.wait(run).codes == [0, 0]
        assert len(run.ranks[1].steps) == 2


@pytest.mark.parametrize("name", [LAYER, PART, ""])
def test_what_stays_away_condemns_nothing(job: Job, saved: Path, name: str) -> None:
    (saved / name).rename(job.root / "aside")
    failed = first_failure(job, start(job, load_seconds=0.2))
    assert failed.code == ExitCode.CHECKPOINT_UNREACHABLE
    assert failed.file == str(saved if name == PART else saved / name)


def test_a_rank_that_cannot_read_ends_and_nobody_waits_for_it(job: Job, saved: Path) -> None:
    (saved / LAYER).unlink()
    (saved / LAYER).symlink_to(LAYER)  # a loop: not even root reads it
    failed = first_failure(job, start(job, load_seconds=0.2))
    assert failed.code == ExitCode.CHECKPOINT_UNREACHABLE
    assert failed.message.startswith("rank 1: ")
    assert f"{LAYER} cannot be read: Too many levels" in failed.message


def test_a_rank_that_cannot_write_is_named_and_all_train_on(beset: Job) -> None:
    """Its save is no checkpoint, the next one is."""
    in_the_way = beset.root / "step-000002.g2" / PART
    (in_the_way / "a folder").mkdir(parents=True)
    saving = Saving(root=str(beset.root), every_steps=2)
    run = beset.start("2x1", steps=5, saving=saving, generation=2)
    assert beset.trainers.wait(run).codes == [0, 0]
    failed = run.ranks[1].one(SaveFailed)
    assert failed.step == 2 and str(in_the_way) in failed.message
    assert run.ranks[0].all(PartWritten)[0].step == 2
    assert PhaseBegun(phase=Phase.HALTED) not in run.ranks[0].lines
    assert [one.step for one in complete(scan(beset.root))][-1] == 5
    assert 2 not in {one.step for one in complete(scan(beset.root))}
