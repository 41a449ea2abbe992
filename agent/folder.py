"""A job's checkpoint folder on order, here or in a store: list it, delete from it, close it.

Blocking; run in a thread. What is in a store raises StoreError.
"""

import contextlib
import shutil
from pathlib import Path

from agent import wire
from agent.remote import is_url, remote_at
from trainer.contract.checkpoints import FolderName, scan, write_done
from trainer.contract.spec import ResumedFrom


def look(number: int, order: wire.Look) -> wire.Looked:
    """What is in the folder; the answer to order ``number``."""
    about = {"number": number, "job": order.job, "generation": order.generation}
    try:
        listing = remote_at(order.root).listing() if is_url(order.root) else scan(order.root)
    except OSError as error:
        return wire.Looked.model_validate({**about, "error": f"cannot list it: {error.strerror}"})
    parts = [
        wire.PartFound(
            folder=part.folder,
            step=part.step,
            generation=part.generation,
            rank=part.rank,
            layers=part.layers,
            layer_count=part.layer_count,
            num_bytes=part.num_bytes,
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
            "newest_generation": listing.newest_generation,
        }
    )


def _begun(resumed: ResumedFrom | None) -> dict[str, int | None]:
    return {
        "resumed_from": resumed.step if resumed else None,
        "resumed_from_generation": resumed.generation if resumed else None,
    }


def delete(order: wire.Delete) -> None:
    """Take each folder out of sight at once, then to pieces; one that is gone already is no error.

    Raises OSError; ValueError for a name that is no checkpoint's.
    """
    for name in order.folders:
        if FolderName.parse(name) is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint")
    if is_url(order.root):
        remote_at(order.root).delete(order.folders)
        return
    root = Path(order.root)
    for name in order.folders:
        aside = root / f".deleted-{name}"
        with contextlib.suppress(FileNotFoundError):
            (root / name).rename(aside)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(aside)


def mark_done(order: wire.MarkDone) -> None:
    """Say in the folder that the job is over. Raises OSError."""
    if is_url(order.root):
        remote_at(order.root).write_done(order.step, order.folder)
    else:
        write_done(order.root, order.step, order.folder)
