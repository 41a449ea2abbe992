"""Whether a job's last save failed: a fact that outlives its generation, until a save succeeds.

What was merely put off, because the save before is still being written, is over with that one. What
failed is over with a complete checkpoint of that step or a later one, or of a newer generation.
"""

import sqlalchemy as sa

from controller.store.tables import jobs
from trainer.contract.checkpoints import FolderName
from trainer.contract.progress import SaveFailed


def failed(connection: sa.Connection, job: str, generation: int, said: SaveFailed) -> None:
    """A rank of ``generation`` has not saved its part."""
    this = (generation, 0 if said.put_off else said.step)
    known = _known(connection, job)
    if known is None or this > known:
        unsaved = {"generation": this[0], "step": this[1]}
        connection.execute(jobs.update().where(jobs.c.id == job).values(unsaved=unsaved))


def succeeded(connection: sa.Connection, job: str, folder: FolderName) -> None:
    """The checkpoint ``folder`` is complete from now on."""
    known = _known(connection, job)
    if known is not None and (folder.generation, folder.step) >= known:
        connection.execute(jobs.update().where(jobs.c.id == job).values(unsaved=None))


def _known(connection: sa.Connection, job: str) -> tuple[int, int] | None:
    """Generation and step of the newest save that failed."""
    found = connection.execute(sa.select(jobs.c.unsaved).where(jobs.c.id == job)).scalar()
    return (found["generation"], found["step"]) if found else None
