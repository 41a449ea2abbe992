"""Steps that were looked at once are kept as a sum: every proof and figure stays what it was."""

from typing import Any

import pytest
import sqlalchemy as sa

from agent import wire
from controller.api import past, schemas
from controller.store import ledger, proving, pruning, tables, totals
from controller.store.engine import Store
from controller.store.folders import take_part
from tests.fakes import story
from tests.fakes.story import NOW
from trainer.contract.checkpoints import Committed
from trainer.contract.samples import expected_hash

pytestmark = pytest.mark.integration

STEPS, GENERATIONS = tables.steps, tables.generations


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest twenty stay whole, of older ones every 32nd: at most ten of 167."""
    monkeypatch.setattr(proving, "WHOLE_STEPS", 20)
    monkeypatch.setattr(proving, "THIN_STEPS", 10)


def prune(store: Store) -> None:
    while store.write(lambda c: pruning.prune(c, NOW - 1e6)).result():
        pass


def alter(store: Store, statement: sa.Update | sa.Delete | sa.Insert) -> None:
    store.write(lambda c: c.execute(statement)).result()


def job_of(connection: sa.Connection) -> Any:
    return connection.execute(sa.select(tables.jobs)).one()


def proof(store: Store) -> ledger.Ledger:
    with store.read() as connection:
        return ledger.ledger_of(connection, job_of(connection))


def kept_seconds(store: Store) -> float:
    with store.read() as connection:
        (job,) = totals.of_jobs(connection)
        return job.kept_seconds


def series(store: Store) -> schemas.SeriesView:
    with store.read() as connection:
        return past.series_view(connection, job_of(connection), 1000)


def left(store: Store) -> list[tuple[int, int]]:
    """(generation, step) of all that are kept one by one."""
    with store.read() as connection:
        rows = connection.execute(sa.select(STEPS.c.generation, STEPS.c.step).order_by(STEPS.c.at))
        return [(row.generation, row.step) for row in rows]


def proven(store: Store) -> dict[int, int | None]:
    """Generation -> up to where it is proven."""
    with store.read() as connection:
        rows = connection.execute(sa.select(GENERATIONS.c.number, GENERATIONS.c.proven_through))
        return {row.number: row.proven_through for row in rows}


def test_steps_are_proven_up_to_where_nobody_goes_back_to_behind_it(store: Store) -> None:
    before, seconds = proof(store), kept_seconds(store)
    assert before.gap == ""
    prune(store)
    assert proven(store) == {1: None, 2: 60, 3: 120, 4: 180}
    assert (proof(store), kept_seconds(store)) == (before, seconds)


def test_a_job_that_is_over_is_proven_to_its_end(store: Store) -> None:
    alter(store, tables.jobs.update().values(finished_at=NOW, state="cancelled"))
    prune(store)
    assert proven(store)[4] == 187


def test_of_old_steps_every_nth_stays_and_the_proof_is_the_same(store: Store, thin: None) -> None:
    before, seconds, all_steps = proof(store), kept_seconds(store), left(store)
    prune(store)
    assert (proof(store), kept_seconds(store)) == (before, seconds)
    ends = {(g, step) for g, (first, last) in story.SPANS.items() for step in (first + 1, last)}
    again = {*range(61, 64), *range(121, 125)}
    assert left(store) == [
        (g, step)
        for g, step in all_steps
        if step > 167 or step % 32 == 0 or step in again or (g, step) in ends
    ]


def test_a_thinned_curve_says_so(store: Store, thin: None) -> None:
    assert not series(store).thinned
    prune(store)
    assert series(store).thinned


@pytest.mark.parametrize("what", ["wrong", "missing"])
def test_nothing_is_proven_past_a_step_that_is_not_right(
    store: Store, thin: None, what: str
) -> None:
    the_50th = (STEPS.c.generation == 2) & (STEPS.c.step == 50)
    wrong = STEPS.update().values(sample_ids_hash="deadbeef")
    alter(store, (wrong if what == "wrong" else STEPS.delete()).where(the_50th))
    before = proof(store)
    assert before.gap_at == 50
    prune(store)
    assert proven(store) == {1: None, 2: 49, 3: 120, 4: 180}
    assert proof(store) == before
    assert [step for g, step in left(store) if g == 2 and step > 50] == list(range(51, 64))


def test_who_goes_on_from_behind_what_was_proven_makes_the_rest_void(store: Store) -> None:
    prune(store)
    folder = "step-000150.g4"
    begun = {"step": 150, "generation": 4, "folder": folder}
    alter(store, GENERATIONS.update().where(GENERATIONS.c.number == 4).values(state="ended"))
    with store.read() as connection:
        row = connection.execute(sa.select(GENERATIONS).where(GENERATIONS.c.number == 4)).one()
        step = connection.execute(sa.select(STEPS).where(STEPS.c.step == 151)).one()
    newer = {**row._mapping, "number": 5, "resumed_from": begun, "committed": 151,
             "state": "running", "proven_through": None}  # fmt: skip
    alter(store, GENERATIONS.insert().values(**newer))
    alter(store, STEPS.insert().values(**{**step._mapping, "generation": 5}))
    found, seconds = proof(store), kept_seconds(store)
    alter(store, GENERATIONS.update().values(proven_through=None))
    assert (found, seconds) == (proof(store), kept_seconds(store))
    assert [(one.first, one.last) for one in found.ranges[-2:]] == [(121, 150), (151, 151)]


def test_steps_that_a_checkpoint_told_of_are_proven_and_not_told_again(store: Store) -> None:
    lost = range(55, 61)
    alter(store, STEPS.delete().where(STEPS.c.generation == 2, STEPS.c.step >= lost[0]))
    told = tuple(
        Committed(step=step, first_position=story.BATCH_SIZE * (step - 1), samples=story.BATCH_SIZE,
                  sample_ids_hash=expected_hash(step, story.BATCH_SIZE, story.SAMPLES, 0))
        for step in lost
    )  # fmt: skip
    part = wire.PartFound(
        folder="step-000060.g2", step=60, generation=2, rank=0, layers=tuple(range(8)),
        layer_count=8, num_bytes=800, resumed_from=0, resumed_from_generation=1, committed=told,
    )  # fmt: skip

    def look() -> int:
        store.write(lambda c: take_part(c, story.JOB, part, 2, 0, None, NOW)).result()
        with store.read() as connection:
            return len(connection.execute(sa.select(tables.found_steps)).all())

    assert look() == len(lost)
    before = proof(store)
    assert before.gap == ""
    prune(store)
    assert proven(store)[2] == 60
    assert proof(store) == before
    assert look() == 0


def test_one_transaction_looks_at_a_bounded_number_of_samples(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "_SAMPLES_AT_ONCE", 5 * story.BATCH_SIZE)
    assert store.write(lambda c: proving.prove_and_thin(c, NOW)).result() == 5
    assert proven(store)[2] == 5
