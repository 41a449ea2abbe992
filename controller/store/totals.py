"""Sums over the rows, for those who watch from outside: of unfinished jobs and the newest others.

A job takes a few statements, and one for each generation whose steps are not all proven.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from controller.core.states import JobState
from controller.store import history, ledger
from controller.store.tables import jobs, nodes, orders, recoveries

_NEWEST = 100
"""So many jobs at most: unfinished ones and the newest of the others."""


@dataclass(frozen=True)
class OfJob:
    """One job in numbers."""

    id: str
    name: str
    state: JobState
    started_at: float | None
    finished_at: float | None
    step: int
    kept_seconds: float
    recoveries: int
    lost_steps: int
    phases: Mapping[str, float]

    def goodput(self, now: float) -> float:
        """Seconds in kept steps by all seconds since the first step, or 1."""
        wall = (self.finished_at or now) - (self.started_at or now)
        return min(1.0, self.kept_seconds / wall) if wall > 0 else 1.0


def of_jobs(connection: sa.Connection) -> list[OfJob]:
    """The unfinished ones and the newest others."""
    over = jobs.c.finished_at.is_not(None)
    rows = connection.execute(
        sa.select(jobs).order_by(over, jobs.c.submitted_at.desc()).limit(_NEWEST)
    ).all()
    recovered = _recoveries(connection, [row.id for row in rows])
    return [_of_job(connection, row, recovered[row.id]) for row in rows]


def _of_job(connection: sa.Connection, row: Any, recovered: Sequence[Any]) -> OfJob:
    links = history.links_of(connection, row.id)
    phases: defaultdict[str, float] = defaultdict(float)
    for recovery in recovered:
        for phase, seconds in recovery.phases.items():
            phases[phase] += seconds or 0.0
    return OfJob(
        id=row.id,
        name=row.name,
        state=JobState(row.state),
        started_at=row.started_at,
        finished_at=row.finished_at,
        step=links[-1].last if links else 0,
        kept_seconds=sum(_kept(connection, row, link) for link in links),
        recoveries=len(recovered),
        lost_steps=sum(r.at_step - r.resumed_from for r in recovered),
        phases=phases,
    )


def _kept(connection: sa.Connection, job: Any, link: history.Link) -> float:
    """The seconds of a link's steps."""
    proven = ledger.proven_of(connection, job, link)
    rest = range(proven.through + 1, link.last + 1)
    return proven.seconds + ledger.seconds_of(connection, job.id, link.generation, rest)


def _recoveries(connection: sa.Connection, ids: Sequence[str]) -> Mapping[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(sa.select(recoveries).where(recoveries.c.job.in_(ids))):
        found[row.job].append(row)
    return found


def of_nodes(connection: sa.Connection) -> dict[str, int]:
    """State -> how many incarnations."""
    counted = sa.select(nodes.c.state, sa.func.count()).group_by(nodes.c.state)
    return {state: number for state, number in connection.execute(counted)}


def of_orders(connection: sa.Connection) -> dict[str, int]:
    """Kind -> how many stand."""
    standing = (
        sa.select(orders.c.kind, sa.func.count())
        .where(orders.c.closed_at.is_(None))
        .group_by(orders.c.kind)
    )
    return {kind: number for kind, number in connection.execute(standing)}
