"""The store on real files and servers: schema, one writer, what a kill leaves, SQLite and
PostgreSQL alike.
"""

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from controller.api.schemas import JobView
from controller.core.events import EventType
from controller.store import tables
from controller.store.engine import Store, StoreError, Urgency, migrate
from controller.store.events import record
from controller.store.tokens import Role
from tests.fakes import postgres
from tests.fakes.agents import Fleet
from tests.fakes.served import served
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL server is installed")
    with postgres.running() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'varuna.db'}"
        return
    server: str = request.getfixturevalue("server")
    name = f"t_{abs(hash(tmp_path))}"
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    admin.dispose()
    yield server.replace("/postgres?", f"/{name}?")


def say(store: Store, message: str, urgency: Urgency = Urgency.FACT) -> "Future[None]":
    return store.write(lambda c: record(c, 1.0, EventType.CONTROLLER_STARTED, message), urgency)


def said(store: Store) -> list[str]:
    with store.read() as connection:
        query = sa.select(tables.events.c.message).order_by(tables.events.c.seq)
        return list(connection.execute(query).scalars())


def test_migrations_go_up_down_and_up_and_end_at_the_tables(url: str) -> None:
    migrate(url)
    migrate(url, "base")
    migrate(url)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
    engine.dispose()


def test_a_database_that_is_newer_than_the_program_is_refused(url: str) -> None:
    migrate(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(StoreError, match=r"9999.*newer"):
        Store(url)


def test_a_file_is_copied_before_it_is_migrated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'varuna.db'}"
    store = Store(url)
    say(store, "before").result()
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["varuna.db"], "nothing to migrate"
    migrate(url, "base")
    (copied,) = tmp_path.glob("varuna.db.at-*")
    copy = sqlite3.connect(copied)
    assert copy.execute("SELECT message FROM events").fetchall() == [("before",)]
    copy.close()


def test_a_migration_that_fails_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'varuna.db'}"

    def fail_late(config: object, to: str) -> None:
        connection = config.attributes["connection"]  # type: ignore[attr-defined]
        connection.exec_driver_sql("CREATE TABLE half (way INTEGER)")
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr("controller.store.engine.command.upgrade", fail_late)
        with pytest.raises(RuntimeError, match="power cut"):
            migrate(url)
    connection = sqlite3.connect(tmp_path / "varuna.db")
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    Store(url).close()


def test_a_write_that_fails_undoes_itself_alone(url: str) -> None:
    store = Store(url)
    gate = threading.Event()
    store.write(lambda c: gate.wait(5))  # so that the next three share a transaction

    def fail(connection: sa.Connection) -> None:
        record(connection, 1.0, EventType.CONTROLLER_STARTED, "never")
        connection.execute(tables.jobs.insert().values(id="no name"))

    first, bad, last = say(store, "first"), store.write(fail), say(store, "last")
    gate.set()
    first.result(5)
    last.result(5)
    with pytest.raises(sa.exc.IntegrityError):
        bad.result(5)
    assert said(store) == ["first", "last"]
    store.close()


def test_decisions_go_first_and_the_end_comes_last(url: str) -> None:
    store = Store(url)
    gate = threading.Event()
    store.write(lambda c: gate.wait(5))
    for word, urgency in (
        ("beat", Urgency.BEAT), ("fact", Urgency.FACT), ("decision", Urgency.DECISION)
    ):  # fmt: skip
        say(store, word, urgency)
    closing = threading.Thread(target=store.close)
    closing.start()
    gate.set()
    closing.join(5)
    again = Store(url)
    assert said(again) == ["decision", "fact", "beat"]
    again.close()
    with pytest.raises(StoreError):
        say(store, "too late")


def test_readers_cannot_write_and_see_one_moment(url: str) -> None:
    store = Store(url)
    with store.read() as connection:
        count = sa.select(sa.func.count()).select_from(tables.events)
        assert connection.execute(count).scalar() == 0
        say(store, "meanwhile").result(5)
        assert connection.execute(count).scalar() == 0
    with pytest.raises(sa.exc.DBAPIError), store.read() as connection:
        record(connection, 1.0, EventType.CONTROLLER_STARTED, "never")
    assert said(store) == ["meanwhile"]
    store.close()


WRITER = """
import sys
from controller.core.events import EventType
from controller.store.engine import Store
from controller.store.events import record
store = Store(sys.argv[1])
number = int(sys.argv[2])
while True:
    futures = [store.write(lambda c, n=number + i: record(
        c, 1.0, EventType.CONTROLLER_STARTED, str(n))) for i in range(3)]
    for future in futures:
        future.result()
    number += 3
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'varuna.db'}"
    acknowledged = 0
    for life in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, url, str(acknowledged)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with writer:
            assert writer.stdout
            for _ in range(10 + 7 * life):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:
                if line.endswith("\n"):
                    acknowledged = int(line)
        store = Store(url)
        messages = said(store)
        assert {str(number) for number in range(acknowledged)} <= set(messages)
        with store.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        store.close()


def test_a_job_lives_on_postgresql_as_well(server: str, tmp_path: Path) -> None:
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE life")
    admin.dispose()
    with (
        served(tmp_path, database=server.replace("/postgres?", "/life?")) as controller,
        Fleet(controller.url, controller.token(Role.AGENT)) as fleet,
        controller.client() as user,
    ):
        fleet.add("vm-1", "vm-2")
        spec = {"name": "a", "program": "builtin:gpt", "nodes": "1..2", "batch_size": 24,
                "steps": 40, "plan": {"micro_batch": 4},
                "checkpoint": {"dir": str(tmp_path), "every": "5 steps"}}  # fmt: skip
        assert user.post("/api/v1/jobs", json={"spec": spec}).status_code == 201

        def job() -> JobView:
            return JobView.model_validate_json(user.get("/api/v1/jobs/a").content)

        until(lambda: job().step >= 8, 20)
        fleet.kill("vm-1")
        until(lambda: job().state.is_over, 20)
        assert (job().state, job().recoveries) == ("succeeded", 1)
        for what in ("ledger", "series", "events", "generations", "checkpoints", "recoveries"):
            assert user.get(f"/api/v1/jobs/a/{what}").status_code == 200
        assert user.get("/api/v1/jobs/a/ledger").json()["samples_committed_once"]
        assert len(user.get("/api/v1/nodes?all=true").json()["items"]) == 2
