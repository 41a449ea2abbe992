"""Checkpoints in a store: what is carried there and back, and a store that fails or stalls.

Behind ``file:`` always, on Azure's blob emulator where there is one.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent import folder, wire
from agent.patience import in_thread
from agent.staging import JobStaging, Staging, StaleError, Uploads
from tests.fakes.waiting import until, until_soon
from tests.fakes.zygotes import run_spec
from tests.integration.test_checkpoint import (
    FOLDER,
    LAYERS,
    assert_same,
    header,
    save,
    trained_states,
)
from tests.unit.trainer import test_checkpoints as folders
from trainer.checkpoint import read_header, read_layers, write_part
from trainer.contract.checkpoints import FolderName, write_json
from trainer.contract.listing import complete, newer_marker, read_folder, scan
from trainer.contract.progress import Line, PartWritten, SaveFailed
from trainer.contract.remote import Remote, StoreError, remote_at
from trainer.contract.spec import RunSpec, Saving, Shape
from trainer.contract.topology import even_cuts

pytestmark = pytest.mark.integration

SHAPE = Shape(depth=3, replicas=2, micro_batch=4)
"""Who wrote what is staged: generation 3, step 12."""


@pytest.fixture(params=["file", "abfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The job's folder in a store."""
    if request.param == "file":
        return f"file://{tmp_path}/store/job_a"
    return f"{request.getfixturevalue('emulated')}/{tmp_path.name}/job_a"


@pytest.fixture
def local(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/job_a"


def spec(url: str, rank: int = 0, **more: Any) -> RunSpec:
    given = {"generation": 3, "rank": rank, "shape": SHAPE, "cuts": even_cuts(LAYERS, 3)}
    return run_spec(job="job_a").model_copy(
        update={**given, "saving": Saving(root=url), "load_from": None, **more}
    )


def staged(url: str, where: Path) -> JobStaging:
    """Six ranks of one node have written their parts."""
    staging = Staging(where / "staging").of(spec(url))
    assert staging
    save(staging.root, trained_states(), depth=3, replicas=2)
    return staging


async def upload_all(staging: JobStaging, url: str) -> None:
    for rank in range(SHAPE.world):
        await staging.upload(FOLDER, spec(url, rank))


# --- There and back ---------------------------------------------------------------------------


def test_a_folder_of_this_machine_is_left_to_the_trainers(tmp_path: Path) -> None:
    assert Staging(tmp_path / "staging").of(spec(str(tmp_path / "ckpt"))) is None


def test_what_is_uploaded_is_listed_as_it_lies_in_a_local_folder(url: str, tmp_path: Path) -> None:
    staging = staged(url, tmp_path)
    assert staging.remote.listing().newest_generation == 0
    asyncio.run(upload_all(staging, url))
    here, there = scan(staging.root), staging.remote.listing()
    assert there.parts == here.parts and len(there.parts) == 6
    assert [m.generation for m in there.markers] == [3], "parts without their generation's marker"
    assert (there.skipped, there.newest_generation, there.root) == ((), 3, url)
    assert [c.folder for c in complete(there)] == [FOLDER]


def test_the_curves_go_with_each_of_rank_0s_parts(url: str, tmp_path: Path) -> None:
    staging = staged(url, tmp_path)
    curve = staging.root / "curves" / "g3" / "steps.csv"
    curve.parent.mkdir(parents=True)
    for text in ("step\n1\n", "step\n1\n2\n"):
        curve.write_text(text)
        asyncio.run(upload_all(staging, url))
        staging.remote.fetch("curves/g3/steps.csv", tmp_path / "there")
        assert (tmp_path / "there").read_text() == text
    assert staging.remote.listing().skipped == ()


@pytest.mark.parametrize(("depth", "rank"), [(1, 0), (3, 2), (7, 6), (7, 3)])
def test_a_stage_gets_its_own_layers_and_what_they_borrow(
    url: str, tmp_path: Path, depth: int, rank: int
) -> None:
    asyncio.run(upload_all(staged(url, tmp_path / "one"), url))
    other = Staging(tmp_path / "two").of(spec(url))
    assert other
    cuts = even_cuts(LAYERS, depth)
    begun = spec(
        url, rank, generation=4, load_from=f"{url}/{FOLDER}", cuts=cuts,
        shape=Shape(depth=depth, replicas=1, micro_batch=4),
    )  # fmt: skip
    told = asyncio.run(other.prepared(begun))
    assert told.saving.root == str(other.root) and told.load_from is not None
    mine = range(cuts[rank], cuts[rank + 1])
    states = trained_states()
    for layer, state in read_layers(told.load_from, mine).items():
        assert_same(state, states[layer])
    assert read_header(told.load_from).step == 12
    borrowed = {0} if LAYERS - 1 in mine else set()
    held = {f.layer for p in read_folder(Path(told.load_from))[0] for f in p.files}
    assert held == {*mine, *borrowed}
    assert len(list(Path(told.load_from).glob("layer-*"))) == len(held), "fetched more"


def test_what_this_node_wrote_itself_is_not_fetched(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = staged(local, tmp_path)
    asyncio.run(upload_all(staging, local))
    monkeypatch.setattr(Remote, "fetch", refuse)
    told = asyncio.run(staging.prepared(spec(local, load_from=f"{local}/{FOLDER}")))
    assert told.load_from and set(read_layers(told.load_from, [0, 1])) == {0, 1}


def test_a_file_that_comes_damaged_is_fetched_again(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(upload_all(staged(local, tmp_path / "one"), local))
    fetch, spoilt = Remote.fetch, []

    def spoiling(self: Remote, name: str, path: Path) -> None:
        fetch(self, name, path)
        if name not in spoilt:
            spoilt.append(name)
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(Remote, "fetch", spoiling)
    other = Staging(tmp_path / "two").of(spec(local))
    assert other
    told = asyncio.run(other.prepared(spec(local, 2, load_from=f"{local}/{FOLDER}")))
    assert told.load_from and len(spoilt) > 1
    for layer, state in read_layers(told.load_from, range(4, 7)).items():
        assert_same(state, trained_states()[layer])


@pytest.mark.parametrize("name", ["layer-005.*", "part-2.json"])
def test_what_comes_late_is_waited_for_and_what_stays_away_is_named(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asyncio.run(upload_all(staged(local, tmp_path / "one"), local))
    (late,) = (tmp_path / "store" / "job_a" / FOLDER).glob(name)
    late.rename(tmp_path / "aside")
    other = Staging(tmp_path / "two").of(spec(local))
    assert other
    failures: list[str] = []

    async def noting(work: Callable[[], Any], seconds: float) -> Any:
        try:
            return await in_thread(work, seconds)
        except StoreError as error:
            failures.append(str(error))
            raise

    async def loaded() -> RunSpec:
        loading = asyncio.ensure_future(other.prepared(wanted(60.0)))
        await until_soon(lambda: failures)
        (tmp_path / "aside").rename(late)
        return await loading

    def wanted(seconds: float) -> RunSpec:
        return spec(local, 2, load_from=f"{local}/{FOLDER}", load_seconds=seconds)

    monkeypatch.setattr("agent.staging.in_thread", noting)
    with pytest.raises(StoreError):
        asyncio.run(other.prepared(wanted(0.05)))
    assert "has no part that holds layer 4" in failures[0] or late.name in failures[0]
    failures.clear()
    told = asyncio.run(loaded())
    assert told.load_from and set(read_layers(told.load_from, range(4, 7))) == {4, 5, 6}


# --- Orders -----------------------------------------------------------------------------------


def test_the_orders_about_a_folder_are_carried_out_in_the_store(url: str, tmp_path: Path) -> None:
    asyncio.run(upload_all(staged(url, tmp_path), url))
    about: dict[str, Any] = {"job": "job_a", "generation": 5, "root": url}
    looked = folder.look(7, wire.Look(**about))
    assert (looked.number, looked.error, looked.newest_generation) == (7, None, 3)
    assert sorted(layer for part in looked.parts for layer in part.layers) == list(range(LAYERS))
    folder.mark_done(wire.MarkDone(**about, step=12, folder=FOLDER))
    done = remote_at(url).listing().done
    assert done and done.folder == FOLDER
    with pytest.raises(ValueError, match="no newer complete checkpoint"):
        folder.delete(wire.Delete(**about, folders=(FOLDER,)))
    newer = folders.part(20, 5, resumed_from=folders.after(12, 3))
    local = folders.written(tmp_path / "newer", newer) / newer.folder
    for file in sorted(local.iterdir()):
        remote_at(url).put(file, f"{newer.folder}/{file.name}")
    for _ in range(2):  # one that is gone already is no error
        folder.delete(wire.Delete(**about, folders=(FOLDER,)))
        assert [one.folder for one in remote_at(url).listing().parts] == [newer.folder]


def test_what_is_wrong_in_the_store_is_skipped_with_a_reason(local: str, tmp_path: Path) -> None:
    asyncio.run(upload_all(staged(local, tmp_path), local))
    there = tmp_path / "store" / "job_a"
    (there / FOLDER / "layer-000.r0.safetensors").write_bytes(b"short")
    (there / FOLDER / "layer-003.r4.safetensors").unlink()
    (there / FOLDER / "part-2.json").write_text("{")
    (there / "notes").mkdir()
    (there / "notes" / "other.json").write_text("{}")
    listing = remote_at(local).listing()
    assert {s.path: s.damaged for s in listing.skipped} == {
        f"{FOLDER}/layer-000.r0.safetensors": True,
        f"{FOLDER}/layer-003.r4.safetensors": False,
        f"{FOLDER}/part-2.json": True,
    }
    assert {part.rank for part in listing.parts} == {1, 3, 5}


def test_a_store_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nosuch://x/job_a cannot be listed"):
        remote_at("nosuch://x/job_a").listing()
    (tmp_path / "plain").write_text("")
    with pytest.raises(StoreError, match=r"plain cannot be written: .*File exists"):
        remote_at(f"file://{tmp_path}/plain").write_marker(3, None)


# --- A store that fails or stalls -------------------------------------------------------------


def refuse(*_: object) -> None:
    raise StoreError("the store is on fire")


def written(kind: str = "", step: int = 12) -> PartWritten:
    return PartWritten(
        folder=str(FolderName(step, 3, kind)), step=step, layers=(0,), layer_count=LAYERS,
        num_bytes=1, seconds=1.0,
    )  # fmt: skip


@asynccontextmanager
async def uploads(staging: JobStaging, url: str) -> AsyncIterator[tuple[Uploads, list[Line]]]:
    """Rank 0's, and what it tells."""
    told: list[Line] = []
    async with asyncio.TaskGroup() as group:
        do: Callable[[Coroutine[None, None, None]], object] = group.create_task
        yield Uploads(staging, spec(url), told.append, do), told


def stepped(staging: JobStaging, step: int) -> None:
    """Another checkpoint by rank 0, of a later step."""
    later = header(0, SHAPE).model_copy(update={"step": step})
    write_part(staging.root, later.folder, later, {0: trained_states()[0]})


def test_a_part_is_told_as_written_when_it_is_in_the_store(local: str, tmp_path: Path) -> None:
    staging = staged(local, tmp_path)

    async def story() -> None:
        async with uploads(staging, local) as (ours, told):
            ours.add(written())
            assert not ours.is_idle and told == []
            await ours.until_idle()
            (line,) = told
            assert isinstance(line, PartWritten) and line.seconds > 1.0
            assert [part.rank for part in staging.remote.listing().parts] == [0]

    asyncio.run(story())


def test_a_store_that_fails_is_tried_again_and_said_once(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, put, failures = staged(local, tmp_path), Remote.put, iter(range(3))

    def failing(self: Remote, path: Path, name: str) -> None:
        if next(failures, None) is not None:
            refuse()
        put(self, path, name)

    monkeypatch.setattr(Remote, "put", failing)

    async def story() -> None:
        async with uploads(staging, local) as (ours, told):
            ours.add(written())
            await ours.until_idle()
            failed, late = told
            assert isinstance(failed, SaveFailed) and "on fire" in failed.message
            assert isinstance(late, PartWritten) and late.folder == failed.folder

    asyncio.run(story())
    assert next(failures, None) is None


def test_an_interrupted_upload_goes_on_where_it_was(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, put = staged(url, tmp_path), Remote.put
    tried, up = list[str](), list[str]()
    others = len(list((staging.root / FOLDER).glob("*.r2.safetensors"))) - 1

    def breaking(self: Remote, path: Path, name: str) -> None:
        tried.append(name)
        if name.endswith("layer-006.r2.safetensors") and tried.count(name) == 1:
            until(lambda: len(staging._uploaded) == others)  # one on its way would go again
            refuse()
        put(self, path, name)
        up.append(name)

    monkeypatch.setattr(Remote, "put", breaking)
    with pytest.raises(StoreError):
        asyncio.run(staging.upload(FOLDER, spec(url, 2)))
    assert staging.remote.listing().parts == (), "a part before its layers"
    asyncio.run(staging.upload(FOLDER, spec(url, 2)))
    (part,) = staging.remote.listing().parts
    assert sorted(up) == sorted(f"{FOLDER}/{file.name}" for file in part.files)
    assert len(up) > 1, "there was nothing to go on from"


@contextmanager
def stalled(monkeypatch: pytest.MonkeyPatch, calls: int = 1) -> Iterator[threading.Event]:
    """The first ``calls`` writes of a file hang until the event is set."""
    put, over, left = Remote.put, threading.Event(), iter(range(calls))

    def stalling(self: Remote, path: Path, name: str) -> None:
        if next(left, None) is not None:
            over.wait(60)
        put(self, path, name)

    monkeypatch.setattr(Remote, "put", stalling)
    yield over
    over.set()


def test_what_cannot_be_kept_up_with_is_skipped_and_the_newest_goes(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = staged(local, tmp_path)
    for step in (13, 14):
        stepped(staging, step)

    async def story() -> None:
        with stalled(monkeypatch) as over:
            async with uploads(staging, local) as (ours, told):
                for step in (12, 13, 14):
                    ours.add(written(step=step))
                    await asyncio.sleep(0)
                (skipped,) = told
                assert isinstance(skipped, SaveFailed) and skipped.step == 13
                assert skipped.put_off
                over.set()
                await ours.until_idle()
                assert [(type(line), line.step) for line in told[1:] if hasattr(line, "step")] == [
                    (PartWritten, 12), (PartWritten, 14),
                ]  # fmt: skip

    asyncio.run(story())
    assert {p.step for p in staging.remote.listing().parts} == {12, 14}
    left = {path.name for path in staging.root.glob("step-*")}
    assert left == {"step-000014.g3"}, "what is uploaded takes room"


def test_a_store_that_never_answers_is_given_up_on_in_time(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hangs is left behind; the next try is another one."""
    monkeypatch.setattr("agent.staging._PATIENCE_SECONDS", 0.3)
    staging = staged(local, tmp_path)

    async def story() -> None:
        with stalled(monkeypatch):
            async with uploads(staging, local) as (ours, told):
                ours.add(written())
                await until_soon(lambda: ours.is_idle)
                failed, late = told
                assert isinstance(failed, SaveFailed) and "has not answered" in failed.message
                assert not failed.put_off
                assert isinstance(late, PartWritten)

    asyncio.run(story())


def test_a_part_that_grows_meanwhile_is_published_as_far_as_it_was_uploaded(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A salvaged part is written anew with more layers while its first ones are on their way."""
    staging = Staging(tmp_path / "staging").of(spec(local))
    assert staging
    save(staging.root, trained_states())
    path, put = staging.root / FOLDER / "part-0.json", Remote.put
    (whole,) = (p for p in scan(staging.root).parts if p.rank == 0)
    less = whole.model_copy(update={"files": whole.files[:1]})
    write_json(path, less)

    def growing(self: Remote, file: Path, name: str) -> None:
        put(self, file, name)
        if file.name == less.files[0].name:
            write_json(path, whole)

    monkeypatch.setattr(Remote, "put", growing)
    assert len(whole.files) > 1
    asyncio.run(staging.upload(FOLDER, spec(local)))
    assert [part.files for part in staging.remote.listing().parts] == [less.files]
    asyncio.run(staging.upload(FOLDER, spec(local)))
    assert [part.files for part in staging.remote.listing().parts] == [whole.files]


def test_a_generation_that_is_void_publishes_nothing_and_its_trainer_learns_of_it(
    url: str, tmp_path: Path
) -> None:
    staging = staged(url, tmp_path)
    staging.remote.write_marker(4, None)
    with pytest.raises(StaleError, match="generation 4 has begun"):
        asyncio.run(staging.upload(FOLDER, spec(url)))
    assert staging.remote.listing().parts == ()
    assert newer_marker(staging.root, 3) == 4
