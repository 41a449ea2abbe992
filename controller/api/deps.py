"""What routes ask for by type."""

from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Depends, Request

from controller.api.errors import not_found
from controller.parts import Parts
from controller.store import jobs


def parts(request: Request) -> Parts:
    """What the controller is made of."""
    found: Parts = request.app.state.parts
    return found


Here = Annotated[Parts, Depends(parts)]


def job_row(connection: sa.Connection, reference: str) -> Any:
    """The row of the job that a path names, else 404."""
    row = jobs.find(connection, reference)
    if row is None:
        raise not_found(f"job {reference!r}")
    return row
