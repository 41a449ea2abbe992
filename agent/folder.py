"""A job's checkpoint folder on order, here or in a store: list it, delete from it, close it.

Nothing is deleted on the word of others alone: this node must itself see the complete checkpoint
that is newer, so that one who looks at another disk than the writers did, or wakes up late, does no
harm. What nobody will finish needs no such sight: halves go with a deletion, and at the job's end.
Blocking; run in a thread. What is in a store raises StoreError.
"""

import contextlib
import os
import shutil
from pathlib import Path

from agent import wire
from trainer.contract.checkpoints import FolderName, is_part, write_done
from trainer.contract.listing import Listing, scan, to_resume
from trainer.contract.remote import is_url, remote_at
from trainer.contract.spec import ResumedFrom

_ASIDE = ".deleted-"
_SKIPPED_TOLD = 20
_STEPS_TOLD = 2000


def look(number: int, order: wire.Look) -> wire.Looked:
    """What is in the folder; the answer to order ``number``."""
    about = {"number": number, "job": order.job, "generation": order.generation}
    try:
        listing = _listing(order.root)
    except OSError as error:
        return wire.Looked.model_validate({**about, "error": f"cannot list it: {error.strerror}"})
    tells = {part.folder: part.rank for part in listing.parts}  # they all say the same
    parts = [
        wire.PartFound(
            folder=part.folder,
            step=part.step,
            generation=part.generation,
            rank=part.rank,
            layers=part.layers,
            layer_count=part.layer_count,
            num_bytes=part.num_bytes,
            committed=part.committed[-_STEPS_TOLD:] if part.rank == tells[part.folder] else (),
            **_begun(part.resumed_from),
        )
        for part in listing.parts
    ]
    markers = [
        wire.MarkerFound(generation=marker.generation, **_begun(marker.resumed_from))
        for marker in listing.markers
    ]
    return wire.Looked.model_validate(
        {
            **about,
            "parts": parts,
            "markers": markers,
            "skipped": [
                wire.FileSkipped(path=skipped.path, reason=skipped.reason)
                for skipped in listing.skipped[:_SKIPPED_TOLD]
            ],
            "newest_generation": listing.newest_generation,
        }
    )


def _begun(resumed: ResumedFrom | None) -> dict[str, int | None]:
    return {
        "resumed_from": resumed.step if resumed else None,
        "resumed_from_generation": resumed.generation if resumed else None,
    }


def _listing(root: str) -> Listing:
    return remote_at(root).listing() if is_url(root) else scan(root)


def delete(order: wire.Delete) -> None:
    """Delete the folders, and what older generations have left half-written.

    A folder that is gone already is no error. Raises OSError; ValueError with the reason when the
    order is not to be carried out.
    """
    _refuse(order, _listing(order.root))
    if is_url(order.root):
        remote_at(order.root).delete(order.folders)
    else:
        for name in order.folders:
            _delete(Path(order.root), name)
    tidy(order.root, order.generation - 1)


def _refuse(order: wire.Delete, listing: Listing) -> None:
    steps = []
    for name in order.folders:
        if (folder := FolderName.parse(name)) is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint")
        steps.append(folder.step)
    if listing.newest_generation > order.generation:
        raise ValueError(f"void: generation {listing.newest_generation} has begun")
    found = to_resume(listing)
    if found is None or found.step <= max(steps, default=-1) or found.folder in order.folders:
        seen = f"the newest complete one here is {found.folder}" if found else "none is complete"
        raise ValueError(
            f"{', '.join(order.folders)}: no newer complete checkpoint is in {order.root} as this "
            f"node sees it, {seen}; is it mounted?"
        )


def _delete(root: Path, name: str) -> None:
    """Out of sight at once, then to pieces."""
    aside = root / f"{_ASIDE}{name}"
    with contextlib.suppress(FileNotFoundError):
        (root / name).rename(aside)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside)


def tidy(place: str, up_to_generation: int) -> None:
    """Remove what interrupted saves of generations up to this one, and interrupted deletions, have
    left in ``place``: nobody will finish it. Nothing, where no such folder is. Raises OSError.
    """
    if is_url(place):
        remote_at(place).tidy(up_to_generation + 1)
        return
    root = Path(place)
    for name in os.listdir(root) if root.is_dir() else ():
        folder = FolderName.parse(name)
        if name.startswith(_ASIDE):
            shutil.rmtree(root / name, ignore_errors=True)
        elif folder and folder.generation <= up_to_generation:
            with contextlib.suppress(FileNotFoundError):  # another node is as far
                _tidy_one(root, name)


def _tidy_one(root: Path, name: str) -> None:
    files = os.listdir(root / name)
    if not any(map(is_part, files)):
        _delete(root, name)
        return
    for file in files:
        if file.startswith(".") and file.endswith(".tmp"):
            (root / name / file).unlink(missing_ok=True)


def mark_done(order: wire.MarkDone) -> None:
    """Say in the folder that the job is over. Raises OSError."""
    if is_url(order.root):
        remote_at(order.root).write_done(order.step, order.folder)
    else:
        write_done(order.root, order.step, order.folder)
