"""Checkpoints in an object store: trainers read and write a local folder, the agent carries.

    trainer -> <staging>/<job>/step-000120.g7/…  -> Uploads -> the store, the part file last
    the store -> <staging>/<job>/loads/step-000120.g7/…  -> trainer (own layers only)

A trainer dies at every morph, so it is the agent that uploads; a part counts, and is reported, when
it is durable in the store. A store that stalls or fails never stops the training: what cannot be
kept up with is skipped and said, and the newest is tried again.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from agent.patience import in_thread
from trainer.contract.checkpoints import (
    FolderName,
    LayerFile,
    Part,
    part_file,
    write_json,
    write_marker,
)
from trainer.contract.listing import Unusable, check_content, check_size, read_folder
from trainer.contract.progress import Line, PartWritten, SaveFailed
from trainer.contract.remote import Remote, StoreError, is_url, remote_at
from trainer.contract.spec import ResumedFrom, RunSpec
from trainer.contract.topology import Seat

_PATIENCE_SECONDS = 30.0
"""For an answer of the store, beside the time that the bytes themselves may take."""
_SLOWEST = 1e6
"""Bytes a second; what is slower counts as stalled."""
_AT_ONCE = 4
_LONGEST_PAUSE = 10.0
_LONGEST_LOAD_PAUSE = 1.0
_GIVE_UP_SECONDS = 600.0

_T = TypeVar("_T")

log = structlog.get_logger()


class StaleError(Exception):
    """A newer generation has begun: what this one wrote is void."""


class Staging:
    """The local folders of all jobs here whose checkpoints are in a store."""

    def __init__(self, folder: Path) -> None:
        """What an earlier agent left in ``folder`` is of no use: nothing of it was reported."""
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._jobs: dict[str, JobStaging] = {}

    def of(self, spec: RunSpec) -> "JobStaging | None":
        """The staging of the spec's job; None when its folder is reached as a path."""
        if not is_url(spec.saving.root):
            return None
        if spec.job not in self._jobs:
            remote = remote_at(spec.saving.root)
            self._jobs[spec.job] = JobStaging(remote, self._folder / spec.job)
        return self._jobs[spec.job]

    async def keep_only(self, jobs: Iterable[str]) -> None:
        """Forget, and delete, what is staged of other jobs and is not on its way."""
        for job in set(self._jobs) - set(jobs):
            if not self._jobs[job].going.total():
                root = self._jobs.pop(job).root
                gone = root.with_name(f".gone-{secrets.token_hex(4)}")
                with contextlib.suppress(FileNotFoundError):
                    root.rename(gone)
                await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)


class JobStaging:
    """One job's local folder beside its folder in the store."""

    def __init__(self, remote: Remote, root: Path) -> None:
        self.remote = remote
        self.root = root
        self._loads = root / "loads"
        self._wanted: dict[str, set[int]] = defaultdict(set)
        self._loading = asyncio.Lock()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._uploaded: set[tuple[str, str, int]] = set()
        self._marked: set[int] = set()
        self.going = Counter[str]()
        """How many parts of each folder are still on their way."""

    # ---- in

    async def prepared(
        self, spec: RunSpec, is_wanted: Callable[[], bool] = lambda: True
    ) -> RunSpec:
        """The spec with local folders in it; what the trainer will load is there on return.

        What is not in the store yet is looked for again while the spec's time and ``is_wanted``
        allow. Raises StoreError.
        """
        update: dict[str, object] = {
            "saving": spec.saving.model_copy(update={"root": str(self.root)})
        }
        if spec.load_from is not None:
            folder = spec.load_from.rsplit("/", 1)[-1]
            stage = Seat.of(spec.rank, spec.shape).stage
            layers = range(spec.cuts[stage], spec.cuts[stage + 1])
            load = partial(self._load, folder, layers, is_wanted)
            deadline = time.monotonic() + spec.load_seconds
            update["load_from"] = str(await _tried(load, deadline, is_wanted))
        return spec.model_copy(update=update)

    async def _load(
        self, folder: str, layers: Iterable[int], is_wanted: Callable[[], bool]
    ) -> Path:
        """Bring ``layers`` of the checkpoint ``folder`` here, with what they borrow.

        The local part files name what is here and nothing else, so that the folder is whole.
        """
        if FolderName.parse(folder) is None:
            raise StoreError(f"{folder!r} is not the name of a checkpoint")
        async with self._loading:
            if not is_wanted():  # and others may be reading what it would clear away
                raise StoreError(f"{folder} is not wanted any more")
            for old in self._loads.iterdir() if self._loads.is_dir() else ():
                if old.name != folder:
                    shutil.rmtree(old, ignore_errors=True)
            parts = await in_thread(partial(self._parts, folder, layers), _PATIENCE_SECONDS)
            self._wanted[folder] |= _with_owners(layers, parts)
            local, files = self._loads / folder, _chosen(parts, self._wanted[folder])
            local.mkdir(parents=True, exist_ok=True)
            chosen = [file for of_rank in files.values() for file in of_rank]
            fetches = (self._fetch(folder, file) for file in chosen)
            # Each is over before another try begins: two would write one file.
            for failure in await asyncio.gather(*fetches, return_exceptions=True):
                if isinstance(failure, BaseException):
                    raise failure
            for part in parts:
                if part.rank in files:
                    here = part.model_copy(update={"files": tuple(files[part.rank])})
                    write_json(local / part_file(part.rank), here)
            return local

    def _parts(self, folder: str, layers: Iterable[int]) -> tuple[Part, ...]:
        """The checkpoint's parts, which hold ``layers``. Blocks."""
        parts = self.remote.parts(folder)
        if missing := set(layers).difference(*(part.layers for part in parts)):
            layer = min(missing)
            raise StoreError(f"{self.remote.url}/{folder} has no part that holds layer {layer}")
        return parts

    async def _fetch(self, folder: str, file: LayerFile) -> None:
        local = self._loads / folder
        if (local / file.name).exists():
            return
        with contextlib.suppress(OSError, Unusable):
            check_size(self.root / folder, file)  # written here, and not cleared away yet
            os.link(self.root / folder / file.name, local / file.name)
            return
        aside = local / f".{file.name}.tmp"
        fetch = partial(self.remote.fetch, f"{folder}/{file.name}", aside)
        async with self._slots:
            for _ in range(2):  # a file that came damaged may come whole
                await in_thread(fetch, _patience(file.num_bytes))
                beside = file.model_copy(update={"name": aside.name})
                with contextlib.suppress(Unusable):
                    await asyncio.to_thread(check_content, local, beside)
                    break
        aside.rename(local / file.name)  # if it is damaged, the trainer says which one it is

    # ---- out

    async def mark(self, generation: int, resumed_from: ResumedFrom | None) -> None:
        """Say in the store that ``generation`` begins; once. Raises StoreError."""
        if generation not in self._marked:
            mark = partial(self.remote.write_marker, generation, resumed_from)
            await in_thread(mark, _PATIENCE_SECONDS)
            self._marked.add(generation)

    async def upload(self, folder: str, spec: RunSpec) -> None:
        """Bring the rank's part of ``folder`` to the store; durable on return.

        Raises StoreError, and StaleError when a newer generation's marker is there.
        """
        found, _ = await asyncio.to_thread(read_folder, self.root / folder)
        part = next((part for part in found if part.rank == spec.rank), None)
        if part is None:
            raise StoreError(f"rank {spec.rank}'s part is not in {self.root / folder} any more")
        await self.mark(spec.generation, spec.resumed_from)
        await asyncio.gather(*(self._put(folder, file) for file in part.files))
        look = partial(self.remote.newer_marker, spec.generation)
        if newer := await in_thread(look, _PATIENCE_SECONDS):
            write_marker(self.root, newer, None)  # here too: the trainer stops at its next save
            raise StaleError(f"generation {newer} has begun")
        # A salvaged part may have grown meanwhile: what is published is what was uploaded.
        publish = partial(self.remote.write, f"{folder}/{part_file(spec.rank)}", part)
        await in_thread(publish, _PATIENCE_SECONDS)
        self._uploaded = {one for one in self._uploaded if _age(one[0]) >= _age(folder)}
        if not spec.rank:
            await self._put_curves(f"curves/g{spec.generation}")

    async def _put_curves(self, folder: str) -> None:
        """Bring what rank 0 wrote so far for people to read, as far as that can be done."""
        try:
            for file in sorted((self.root / folder).glob("*")):
                put = partial(self.remote.put, file, f"{folder}/{file.name}")
                await in_thread(put, _patience(file.stat().st_size))
        except (StoreError, OSError) as error:  # the next checkpoint brings them
            log.warning("curves not in the store", folder=folder, because=str(error))

    async def _put(self, folder: str, file: LayerFile) -> None:
        if (once := (folder, file.name, file.num_bytes)) in self._uploaded:
            return
        put = partial(self.remote.put, self.root / folder / file.name, f"{folder}/{file.name}")
        async with self._slots:
            await in_thread(put, _patience(file.num_bytes))
        self._uploaded.add(once)

    def clear(self, before: str) -> None:
        """Delete what was staged before the folder ``before``, but for what is still to go."""
        bound = _age(before)
        for path in self.root.iterdir():
            is_checkpoint = FolderName.parse(path.name) is not None
            if is_checkpoint and not self.going[path.name] and _age(path.name) < bound:
                shutil.rmtree(path, ignore_errors=True)


def _age(folder: str) -> tuple[int, int]:
    name = FolderName.parse(folder)
    assert name, "the caller has looked"
    return name.generation, name.step


def _with_owners(layers: Iterable[int], parts: Iterable[Part]) -> set[int]:
    """``layers`` and those whose weights they borrow."""
    wanted = set(layers)
    for part in parts:
        for file in part.files:
            if file.layer in wanted:
                wanted |= {int(owner.split(".")[1]) for owner in file.aliases.values()}
    return wanted


def _chosen(parts: Iterable[Part], layers: set[int]) -> dict[int, list[LayerFile]]:
    """Rank -> its files that are wanted; of a layer that is there twice the lowest rank's."""
    chosen: dict[int, list[LayerFile]] = defaultdict(list)
    missing = set(layers)
    for part in parts:
        for file in part.files:
            if file.layer in missing:
                missing.remove(file.layer)
                chosen[part.rank].append(file)
    return chosen


def _patience(num_bytes: int) -> float:
    return _PATIENCE_SECONDS + num_bytes / _SLOWEST


async def _tried(
    work: Callable[[], Awaitable[_T]], deadline: float, is_wanted: Callable[[], bool]
) -> _T:
    """What ``work`` gives, at a try before ``deadline``. Raises StoreError."""
    pause = 0.1
    while True:
        try:
            return await work()
        except StoreError:
            if time.monotonic() + pause > deadline or not is_wanted():
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_LOAD_PAUSE)


class Uploads:
    """One trainer's parts on their way to the store, one after the other.

    When it falls behind, the newest waits and those before it are skipped.
    """

    def __init__(
        self,
        staging: JobStaging,
        spec: RunSpec,
        tell: Callable[[Line], None],
        do: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._staging = staging
        self._spec = spec
        self._tell = tell
        self._do = do
        self._waiting: PartWritten | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to go."""
        return self._idle.is_set()

    async def until_idle(self) -> None:
        """Wait until nothing is left to go, durable or given up."""
        await self._idle.wait()

    def mark(self) -> None:
        """Let the store know that the generation begins; soon, and before any part."""
        self._do(self._mark())

    async def _mark(self) -> None:
        try:
            await self._staging.mark(self._spec.generation, self._spec.resumed_from)
        except StoreError as error:
            log.warning("cannot mark the generation in the store yet", because=str(error))

    def add(self, line: PartWritten) -> None:
        """The trainer has written a part; it is told as written when it is in the store."""
        before, self._waiting = self._waiting, line
        self._staging.going[line.folder] += 1
        if before:
            self._staging.going[before.folder] -= 1
            if before.folder != line.folder:
                because = "it is skipped, because the one before is still on its way"
                self._fail(before, because, put_off=True)
        if self._idle.is_set():
            self._idle.clear()
            self._do(self._run())

    async def _run(self) -> None:
        while line := self._waiting:
            self._waiting = None
            await self._carry(line)
            self._staging.going[line.folder] -= 1
        self._idle.set()

    async def _carry(self, line: PartWritten) -> None:
        began, pause, is_said = time.monotonic(), 0.25, False
        while True:
            try:
                await self._staging.upload(line.folder, self._spec)
            except StaleError as error:
                return self._fail(line, str(error))
            except (StoreError, OSError, Unusable) as error:
                if not is_said:
                    self._fail(line, f"it is not in the store yet: {error}")
                    is_said = True
            else:
                taken = line.seconds + time.monotonic() - began
                self._tell(line.model_copy(update={"seconds": taken}))
                return await asyncio.to_thread(self._staging.clear, line.folder)
            if self._waiting or time.monotonic() - began > _GIVE_UP_SECONDS:
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _fail(self, line: PartWritten, message: str, *, put_off: bool = False) -> None:
        log.warning("checkpoint not in the store", folder=line.folder, because=message)
        failed = SaveFailed(folder=line.folder, step=line.step, message=message, put_off=put_off)
        self._tell(failed)
