"""What is known of a program's costs from jobs that ran it before: by its key and device kind."""

import sqlalchemy as sa

from controller.core.jobspec import JobSpec
from controller.core.whatif import program_key
from controller.store.tables import jobs
from trainer.contract.costs import LayerCosts

_LOOKED_AT = 200
"""The newest jobs that measured something."""


def known_costs(
    connection: sa.Connection, spec: JobSpec, device_kind: str | None = None
) -> tuple[str, LayerCosts] | None:
    """The name of the newest job that measured this program, and what it found. ``device_kind``
    None: on whatever.
    """
    key = program_key(spec)
    rows = connection.execute(
        sa.select(jobs.c.name, jobs.c.costs)
        .where(jobs.c.costs.is_not(None))
        .order_by(jobs.c.submitted_at.desc())
        .limit(_LOOKED_AT)
    )
    for name, stored in rows:
        if stored.get("program") == key and device_kind in (None, stored.get("device_kind")):
            return f"job {name}", LayerCosts.model_validate(stored)
    return None
