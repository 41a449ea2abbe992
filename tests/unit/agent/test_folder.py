"""Deleting from a checkpoint folder: never on the word of others alone, and never a half of it."""

import os
from pathlib import Path

import pytest

from agent import folder, wire
from tests.unit.trainer.test_checkpoints import after, part, written
from trainer.contract.checkpoints import Committed, write_marker
from trainer.contract.listing import complete, scan

OLD = "step-000010.g2"
ALL = ["step-000010.g2", "step-000020.g2", "step-000030.g3"]


@pytest.fixture(params=["path", "url"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """How it is named in orders, and where it lies: steps 10, 20 and, of generation 3, 30."""
    root = written(tmp_path / "job", part(10, 2), part(20, 2))
    written(root, part(30, 3, resumed_from=after(20, 2)))
    write_marker(root, 3, after(20, 2))
    return (f"file://{root}" if request.param == "url" else str(root)), root


def order(root: str, *folders: str, generation: int = 3) -> wire.Delete:
    return wire.Delete(job="job_a", generation=generation, root=root, folders=folders)


def left(root: Path) -> list[str]:
    return [found.folder for found in complete(scan(root))]


def test_what_a_newer_complete_one_supersedes_is_deleted_once(job: tuple[str, Path]) -> None:
    name, root = job
    for _ in range(2):  # one that is gone already is no error
        folder.delete(order(name, OLD))
        assert left(root) == ALL[1:]
        assert sorted(os.listdir(root)) == ["gen-3.json", *ALL[1:]]


def test_a_node_that_sees_no_newer_one_deletes_nothing(job: tuple[str, Path]) -> None:
    """The writers' disk is not the one that it sees: it is not mounted here, or was not there."""
    name, root = job
    (root / ALL[2] / "part-0.json").unlink()
    (root / ALL[1] / "layer-000.r0.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{OLD}: no newer complete checkpoint is in .*{OLD}; is"):
        folder.delete(order(name, OLD))
    with pytest.raises(ValueError, match="none is complete; is it mounted"):
        folder.delete(order(f"{name}/elsewhere", OLD))
    assert left(root) == [OLD]


@pytest.mark.parametrize("newer", ["gen-4.json", "step-000030.g4"])
def test_a_node_that_wakes_up_in_a_later_generation_deletes_nothing(
    job: tuple[str, Path], newer: str
) -> None:
    name, root = job
    if newer.startswith("gen"):
        write_marker(root, 4, after(30, 3))
    else:
        written(root, part(30, 4, resumed_from=after(20, 2)))
    with pytest.raises(ValueError, match="void: generation 4 has begun"):
        folder.delete(order(name, OLD))
    assert OLD in left(root)
    folder.delete(order(name, OLD, generation=4))
    assert OLD not in left(root)


def test_no_other_name_is_touched(job: tuple[str, Path]) -> None:
    name, root = job
    with pytest.raises(ValueError, match=r"'\.\./job' is not the name of a checkpoint"):
        folder.delete(order(name, OLD, "../job"))
    assert left(root) == ALL


def test_what_older_generations_left_half_done_goes_too(job: tuple[str, Path]) -> None:
    """A save without a part, an unfinished file, a deletion that was interrupted."""
    name, root = job
    (root / "step-000025.g2").mkdir()
    (root / "step-000025.g2" / "layer-000.r0.safetensors").write_bytes(b"half")
    (root / "step-000031.g3").mkdir()
    (root / "step-000031.g3" / "layer-000.r0.safetensors").write_bytes(b"being written")
    if name == str(root):  # a store knows neither
        (root / ALL[1] / ".layer-001.r0.safetensors.77.tmp").write_bytes(b"ha")
        (root / ".deleted-step-000005.g2").mkdir()
        (root / ".deleted-step-000005.g2" / "part-0.json").write_bytes(b"{")
    folder.delete(order(name, OLD))
    assert sorted(os.listdir(root)) == ["gen-3.json", *ALL[1:], "step-000031.g3"]
    assert all("tmp" not in file for file in os.listdir(root / ALL[1]))
    assert left(root) == ALL[1:]


def test_what_the_last_generation_was_saving_goes_when_its_job_is_over(
    job: tuple[str, Path],
) -> None:
    name, root = job
    (root / "step-000031.g3").mkdir()
    (root / "step-000031.g3" / "layer-000.r0.safetensors").write_bytes(b"being written")
    if name == str(root):  # a store knows no such files
        (root / "step-000031.g3" / ".layer-001.r0.safetensors.77.tmp").write_bytes(b"be")
        (root / ALL[2] / ".layer-001.r0.safetensors.77.tmp").write_bytes(b"be")
    folder.tidy(name, 2)
    assert (root / "step-000031.g3").exists()
    folder.tidy(name, 3)
    assert sorted(os.listdir(root)) == ["gen-3.json", *ALL] and left(root) == ALL
    assert all("tmp" not in file for file in os.listdir(root / ALL[2]))


def test_where_no_folder_is_there_is_nothing_to_tidy(tmp_path: Path) -> None:
    folder.tidy(str(tmp_path / "none"), 3)
    assert os.listdir(tmp_path) == []


def test_what_is_of_no_use_is_told_with_its_reason(job: tuple[str, Path]) -> None:
    name, root = job
    (root / ALL[1] / "layer-000.r0.safetensors").write_bytes(b"short")
    look = wire.Look(job="job_a", generation=4, root=name)
    (skipped,) = folder.look(7, look).skipped
    assert skipped.path == f"{ALL[1]}/layer-000.r0.safetensors"
    assert skipped.reason == "has 5 bytes instead of 7"


def test_one_part_of_a_folder_tells_which_steps_it_holds(tmp_path: Path) -> None:
    steps = tuple(
        Committed(step=step, first_position=8 * step, samples=8, sample_ids_hash="0" * 8)
        for step in (9, 10)
    )
    both = [part(rank=rank).model_copy(update={"committed": steps}) for rank in (0, 1)]
    root = written(tmp_path / "job", *both)
    looked = folder.look(7, wire.Look(job="job_a", generation=3, root=str(root)))
    assert sorted(len(found.committed) for found in looked.parts) == [0, 2]
