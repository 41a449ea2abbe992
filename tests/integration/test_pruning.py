"""What is old and of no more use is forgotten; what a proof or a lineage hangs on never is."""

from typing import Any

import pytest
import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.store import conduct, events, history, ledger, nodes, pruning, tables
from controller.store.engine import Store
from tests.fakes import story
from tests.fakes.story import NOW

pytestmark = pytest.mark.integration

LATER = NOW + 1e6


def rows(store: Store, table: sa.Table) -> list[Any]:
    with store.read() as connection:
        return list(connection.execute(sa.select(table)).all())


def prune(store: Store, before: float) -> int:
    return store.write(lambda c: pruning.prune(c, before)).result()


def lineage(connection: sa.Connection) -> list[tuple[int, int, int]]:
    return [(of.generation, of.first, of.last) for of in history.links_of(connection, story.JOB)]


def delete(store: Store, folders: list[str]) -> None:
    gone = tables.checkpoints.update().where(tables.checkpoints.c.folder.in_(folders))
    store.write(lambda c: c.execute(gone.values(deleted_at=NOW))).result()


def test_nothing_goes_before_its_time(store: Store) -> None:
    def all_rows() -> dict[str, int]:
        return {table.name: len(rows(store, table)) for table in tables.metadata.sorted_tables}

    before = all_rows()
    while prune(store, NOW - 1e6):
        pass
    assert all_rows() == before


def test_old_events_go_and_the_newest_stays(store: Store) -> None:
    newest = max(event.seq for event in rows(store, tables.events))
    prune(store, LATER)
    assert [event.seq for event in rows(store, tables.events)] == [newest]
    store.write(lambda c: events.record(c, LATER, EventType.CONTROLLER_STARTED, "Again.")).result()
    assert rows(store, tables.events)[-1].seq == newest + 1


def test_closed_orders_go_and_those_that_stand_or_belong_to_what_runs_stay(store: Store) -> None:
    def give(connection: sa.Connection) -> list[int]:
        numbers = [
            nodes.give_order(
                connection, "node-1", "incarnation-1", story.JOB, generation,
                wire.Stop(job=story.JOB, up_to_generation=generation), NOW,
            )
            for generation in (2, 2, 4)
        ]  # fmt: skip
        closed = tables.orders.update().where(tables.orders.c.number.in_([numbers[0], numbers[2]]))
        connection.execute(closed.values(closed_at=NOW))
        return numbers

    numbers = store.write(give).result()
    prune(store, LATER)
    assert [order.number for order in rows(store, tables.orders)] == numbers[1:]


def test_parts_of_deleted_checkpoints_go_and_the_lineage_stays(store: Store) -> None:
    folders = [row.folder for row in rows(store, tables.checkpoints)]
    with store.read() as connection:
        before = lineage(connection)
        (job,) = connection.execute(sa.select(tables.jobs)).all()
        proof = ledger.ledger_of(connection, job)
    delete(store, folders[:-3])
    while prune(store, LATER):
        pass
    assert {part.folder for part in rows(store, tables.parts)} == set(folders[-3:])
    assert {row.folder for row in rows(store, tables.checkpoints)} == {folders[0], *folders[-3:]}
    with store.read() as connection:
        assert lineage(connection) == before
        assert ledger.ledger_of(connection, job) == proof


def test_one_transaction_takes_a_bounded_number_of_rows(store: Store) -> None:
    def record(connection: sa.Connection) -> None:
        for _ in range(2 * pruning.AT_ONCE):
            events.record(connection, NOW - 5, EventType.CONTROLLER_STARTED, "The controller.")

    store.write(record).result()
    kept = len(rows(store, tables.events))
    prune(store, NOW)
    assert kept - len(rows(store, tables.events)) == pruning.AT_ONCE


def test_who_has_not_been_heard_of_for_long_has_a_clean_record(store: Store) -> None:
    def behave(connection: sa.Connection) -> None:
        conduct.lost(connection, "lost-long-ago", NOW - 100)
        conduct.lost(connection, "lost-lately", NOW)
        conduct.drilled(connection, ["drilled-lately"], NOW)

    store.write(behave).result()
    prune(store, NOW - 50)
    assert {row.node for row in rows(store, tables.conduct)} == {"lost-lately", "drilled-lately"}
