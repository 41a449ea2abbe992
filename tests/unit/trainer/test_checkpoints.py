"""The checkpoint folder: what counts, what is skipped and why, and what a job goes on from."""

import json
import os
from pathlib import Path

import pytest
import xxhash

from trainer.contract.checkpoints import (
    DataPosition,
    FolderName,
    LayerFile,
    Part,
    layer_file,
    part_file,
    write_done,
    write_json,
    write_marker,
)
from trainer.contract.listing import (
    Unusable,
    check_content,
    checkpoints,
    complete,
    newer_marker,
    scan,
    to_resume,
)
from trainer.contract.spec import ResumedFrom, Shape

CONTENT = b"weights"


def part(
    step: int = 10,
    generation: int = 2,
    *,
    rank: int = 0,
    layers: tuple[int, ...] = (0, 1),
    layer_count: int = 2,
    resumed_from: ResumedFrom | None = None,
    samples: int = 100,
) -> Part:
    return Part(
        step=step,
        generation=generation,
        rank=rank,
        shape=Shape(depth=1, replicas=1, micro_batch=4),
        layer_count=layer_count,
        resumed_from=resumed_from,
        data=DataPosition(batch_size=8, seed=0, samples=samples),
        files=tuple(
            LayerFile(
                layer=layer,
                name=layer_file(layer, rank),
                num_bytes=len(CONTENT),
                xxh3=xxhash.xxh3_128(CONTENT).hexdigest(),
            )
            for layer in layers
        ),
    )


def written(root: Path, *parts: Part) -> Path:
    for one in parts:
        folder = root / one.folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in one.files:
            (folder / file.name).write_bytes(CONTENT)
        write_json(folder / part_file(one.rank), one)
    return root


def after(step: int, generation: int) -> ResumedFrom:
    return ResumedFrom(step=step, generation=generation, folder=str(FolderName(step, generation)))


def skipped(root: Path, layer_count: int | None = None) -> dict[str, str]:
    return {s.path: s.reason for s in scan(root, layer_count).skipped}


# --- Names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (FolderName(120, 7), "step-000120.g7"),
        (FolderName(123, 7, "salvage"), "step-000123.g7.salvage"),
        (FolderName(0, 1), "step-000000.g1"),
        (FolderName(12345678, 10), "step-12345678.g10"),
    ],
)
def test_a_folder_is_named_by_step_generation_and_kind(name: FolderName, text: str) -> None:
    assert str(name) == text
    assert FolderName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    ["step-12.g1", "step-0000120.g1", "step-000120", "step-000120.g0", "step-000120.g01", "x",
     "step-000120.g1.", "step-000120.g1\n", "step-٠٠٠١٢٠.g1", ".step-000120.g1",
     f"step-{10**20}.g1", f"step-000120.g{10**20}"],
)  # fmt: skip
def test_no_other_name_is_a_checkpoints(text: str) -> None:
    assert FolderName.parse(text) is None


# --- Complete


def test_parts_of_two_ranks_that_cover_the_model_are_a_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, part(rank=0, layers=(0,)), part(rank=3, layers=(1,)))
    (found,) = complete(scan(tmp_path))
    assert (found.folder, found.step, found.generation) == ("step-000010.g2", 10, 2)
    assert found.num_bytes == 2 * len(CONTENT)


def test_a_layer_that_nobody_wrote_makes_it_incomplete(tmp_path: Path) -> None:
    written(tmp_path, part(layers=(0, 2), layer_count=3))
    listing = scan(tmp_path)
    assert complete(listing) == ()
    assert checkpoints(listing)[0].missing == (1,)


def test_a_rank_without_layers_of_its_own_writes_a_part_that_covers_nothing(tmp_path: Path) -> None:
    written(tmp_path, part(rank=0), part(rank=1, layers=()))
    assert [p.rank for p in scan(tmp_path).parts] == [0, 1]
    assert len(complete(scan(tmp_path))) == 1


def test_parts_of_different_generations_never_add_up(tmp_path: Path) -> None:
    written(tmp_path, part(generation=2, layers=(0,)), part(generation=3, rank=1, layers=(1,)))
    assert complete(scan(tmp_path)) == ()


def test_a_salvage_beside_a_periodic_checkpoint_is_a_folder_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, part(), part().model_copy(update={"kind": "salvage"}))
    assert [c.folder for c in complete(scan(tmp_path))] == [
        "step-000010.g2",
        "step-000010.g2.salvage",
    ]


# --- Damage


def test_a_missing_folder_is_an_empty_one(tmp_path: Path) -> None:
    listing = scan(tmp_path / "never")
    assert (listing.parts, listing.markers, listing.skipped) == ((), (), ())
    assert to_resume(listing) is None


def test_a_root_that_cannot_be_read_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        scan(tmp_path / "file")


def test_a_truncated_layer_file_is_skipped_with_its_name(tmp_path: Path) -> None:
    written(tmp_path, part())
    (tmp_path / "step-000010.g2" / layer_file(1, 0)).write_bytes(CONTENT[:-1])
    assert skipped(tmp_path) == {
        "step-000010.g2/layer-001.r0.safetensors": "has 6 bytes instead of 7"
    }


def test_a_missing_layer_file_is_skipped_with_its_name(tmp_path: Path) -> None:
    written(tmp_path, part())
    (tmp_path / "step-000010.g2" / layer_file(0, 0)).unlink()
    assert skipped(tmp_path) == {"step-000010.g2/layer-000.r0.safetensors": "is missing"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is empty"),
        (b'{"format":1,"step"', "cannot be used: Invalid JSON"),
        (b"\xff\xfe", "cannot be used: Invalid JSON"),
        (b"[" * 100_000, "cannot be used: Invalid JSON"),
        (b"{}", "cannot be used: step: Field required"),
        (b'{"format":3}', "cannot be used: format: Input should be 1 or 2"),
    ],
)
def test_a_broken_part_file_is_skipped_with_a_reason(
    tmp_path: Path, text: bytes, reason: str
) -> None:
    written(tmp_path, part(rank=0), part(rank=1))
    (tmp_path / "step-000010.g2" / "part-1.json").write_bytes(text)
    assert skipped(tmp_path)["step-000010.g2/part-1.json"].startswith(reason)
    assert len(complete(scan(tmp_path))) == 1


@pytest.mark.parametrize("cut", range(0, 700, 23))
def test_a_part_cut_anywhere_never_counts_and_never_raises(tmp_path: Path, cut: int) -> None:
    written(tmp_path, part())
    file = tmp_path / "step-000010.g2" / "part-0.json"
    file.write_bytes(file.read_bytes().rstrip()[:-1][:cut])
    assert scan(tmp_path).parts == ()


@pytest.mark.parametrize("name", ["part-0.json", "layer-001.r0.safetensors"])
def test_a_byte_flipped_anywhere_in_a_part_is_seen(tmp_path: Path, name: str) -> None:
    """Of a layer file verify alone sees it: a listing reads sizes only."""
    (one,) = scan(written(tmp_path, part(resumed_from=after(8, 1)))).parts
    folder = tmp_path / one.folder
    whole = (folder / name).read_bytes()
    for at in range(0, len(whole), 3):
        if whole[at : at + 1].isspace():
            continue
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if name.startswith("part"):
            assert scan(tmp_path).parts == (), whole[at - 20 : at + 1]
        else:
            with pytest.raises(Unusable, match="hash differs"):
                check_content(folder, one.files[1])


FORMAT_1 = """{
 "checksum": "f8130ab596a6f3f987a00987c5698a6b6157a607729692696141951cbbee89ed",
 "format": 1, "step": 10, "generation": 2, "kind": "", "rank": 0,
 "shape": {"depth": 1, "replicas": 1, "micro_batch": 4},
 "layer_count": 1, "resumed_from": null,
 "data": {"batch_size": 8, "seed": 0, "samples": 100, "fingerprint": ""},
 "committed": [],
 "files": [{
   "layer": 0, "name": "layer-000.r0.safetensors", "num_bytes": 7,
   "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
   "aliases": {"layers.0.a": "layers.0.b"}
 }]
}"""


def test_a_part_that_was_written_in_format_1_is_read_and_its_content_checked(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "step-000010.g2"
    folder.mkdir()
    (folder / "part-0.json").write_text(FORMAT_1)
    (folder / "layer-000.r0.safetensors").write_bytes(CONTENT)
    (one,) = scan(tmp_path).parts
    check_content(folder, one.files[0])
    (folder / "layer-000.r0.safetensors").write_bytes(CONTENT[::-1])
    with pytest.raises(Unusable, match="hash differs"):
        check_content(folder, one.files[0])


def test_a_part_that_claims_more_layers_than_the_model_is_condemned(tmp_path: Path) -> None:
    text = part().model_dump(mode="json") | {"layer_count": 1}
    written(tmp_path, part())
    (tmp_path / "step-000010.g2" / "part-0.json").write_text(json.dumps(text))
    assert "holds layer 1 of 1 layers" in skipped(tmp_path)["step-000010.g2/part-0.json"]


def test_a_part_of_another_model_is_condemned_when_the_model_is_known(tmp_path: Path) -> None:
    written(tmp_path, part())
    assert skipped(tmp_path, layer_count=2) == {}
    assert skipped(tmp_path, layer_count=8) == {
        "step-000010.g2/part-0.json": "is of a model with 2 layers, not 8"
    }


def test_a_part_that_disagrees_with_the_others_is_condemned(tmp_path: Path) -> None:
    written(
        tmp_path,
        part(rank=0, layers=(0,)),
        part(rank=1, layers=(1,)),
        part(rank=2, layers=(0,), layer_count=1),
    )
    assert list(skipped(tmp_path)) == ["step-000010.g2/part-2.json"]
    assert complete(scan(tmp_path))[0].layer_count == 2


def test_when_two_stories_are_told_equally_often_none_is_believed(tmp_path: Path) -> None:
    written(tmp_path, part(rank=0, layers=(0,)), part(rank=1, layers=(1,), samples=99))
    assert len(skipped(tmp_path)) == 2
    assert scan(tmp_path).parts == ()


def test_a_part_moved_to_another_folder_or_rank_is_not_taken(tmp_path: Path) -> None:
    written(tmp_path, part())
    folder = tmp_path / "step-000010.g2"
    (folder / "part-0.json").rename(folder / "part-5.json")
    folder.rename(tmp_path / "step-000010.g3")
    assert skipped(tmp_path) == {"step-000010.g3/part-5.json": "is rank 0's of step-000010.g2"}


def test_a_part_may_only_name_its_own_files(tmp_path: Path) -> None:
    written(tmp_path, part())
    file = tmp_path / "step-000010.g2" / "part-0.json"
    file.write_text(file.read_text().replace(layer_file(0, 0), "../../etc/passwd"))
    assert (
        "names layer 0's file '../../etc/passwd'" in skipped(tmp_path)["step-000010.g2/part-0.json"]
    )


def test_other_files_and_unfinished_ones_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, part())
    (tmp_path / "README").write_text("mine")
    (tmp_path / "step-000010.g2" / ".part-1.json.77.tmp").write_text("{")
    assert skipped(tmp_path) == {}


def test_a_file_in_the_place_of_a_checkpoint_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "step-000010.g2").write_text("")
    assert skipped(tmp_path) == {"step-000010.g2": "cannot be read: Not a directory"}


# --- Markers and numbers


def test_markers_and_the_end_are_listed(tmp_path: Path) -> None:
    write_marker(tmp_path, 1, None)
    write_marker(tmp_path, 10, after(4, 1))
    write_done(tmp_path, 20, "step-000020.g10")
    listing = scan(tmp_path)
    assert [(m.generation, m.resumed_from) for m in listing.markers] == [
        (1, None),
        (10, after(4, 1)),
    ]
    assert listing.done is not None and listing.done.folder == "step-000020.g10"


def test_a_writer_sees_a_newer_marker_even_a_damaged_one(tmp_path: Path) -> None:
    assert newer_marker(tmp_path / "never", 1) is None
    write_marker(tmp_path, 3, None)
    (tmp_path / "gen-5.json").write_text("")
    assert newer_marker(tmp_path, 3) == 5
    assert newer_marker(tmp_path, 5) is None


def test_generation_numbers_never_come_back(tmp_path: Path) -> None:
    write_marker(tmp_path, 3, None)
    (tmp_path / "gen-7.json").write_text("{")
    (tmp_path / "step-000010.g9").mkdir()
    listing = scan(tmp_path)
    assert listing.newest_generation == 9
    assert [s.path for s in listing.skipped] == ["gen-7.json"]


def test_a_marker_with_anothers_number_is_skipped(tmp_path: Path) -> None:
    write_marker(tmp_path, 3, None)
    (tmp_path / "gen-3.json").rename(tmp_path / "gen-4.json")
    assert skipped(tmp_path) == {"gen-4.json": "is generation 3's"}


# --- Going on from the folder alone


def test_the_folder_alone_says_what_to_resume_from(tmp_path: Path) -> None:
    written(
        tmp_path,
        part(0, 1),
        part(10, 2, resumed_from=after(0, 1)),
        part(20, 2, resumed_from=after(0, 1)),
        part(30, 2, layers=(0,), resumed_from=after(0, 1)),
    )
    write_marker(tmp_path, 2, after(0, 1))
    newest = to_resume(scan(tmp_path))
    assert newest is not None and newest.folder == "step-000020.g2"


def test_a_newer_marker_alone_voids_what_a_stale_generation_wrote_later(tmp_path: Path) -> None:
    written(tmp_path, part(0, 1), part(10, 2, resumed_from=after(0, 1)))
    write_marker(tmp_path, 3, after(10, 2))
    written(tmp_path, part(20, 2, resumed_from=after(0, 1)))
    newest = to_resume(scan(tmp_path))
    assert newest is not None and newest.step == 10


def test_a_step_can_be_asked_for(tmp_path: Path) -> None:
    written(tmp_path, part(0, 1), part(10, 2, resumed_from=after(0, 1)))
    asked = to_resume(scan(tmp_path), step=0)
    assert asked is not None and asked.folder == "step-000000.g1"
    assert to_resume(scan(tmp_path), step=7) is None


# --- Writing the small files


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "gen-3.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_marker(tmp_path, 3, None)
    assert os.listdir(tmp_path) == ["gen-3.json"]
