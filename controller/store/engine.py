"""The store's machine room: ONE writing connection, in a thread of its own, and readers beside it.

    write(work) --> [ queue: decisions first ] --> writer thread: BEGIN IMMEDIATE, a savepoint for
                                                   each work that waits, ONE commit, then answers
    read()      --> a connection that cannot write, one snapshot for as long as it is held

Why one writer: the SQLite of many machines (3.7 .. 3.51) can damage a WAL file when two connections
write or checkpoint at once, and a transaction that reads before it writes fails when another writer
was faster. PostgreSQL runs the same code. An answered write is durable (synchronous=FULL).
"""

import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

Result = TypeVar("Result")

MIGRATIONS = Path(__file__).parents[2] / "migrations"
_BATCH = 64
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000")


class Urgency(IntEnum):
    """Who goes first when several writes wait."""

    DECISION = 0
    FACT = 1
    BEAT = 2


class _Waiting(NamedTuple):
    urgency: int
    turn: int
    work: Callable[[sa.Connection], Any] | None  # None: the writer ends
    answer: Future[Any]


class StoreError(Exception):
    """The store cannot be used; the message says why and what to do."""


class Store:
    """The open database, migrated to the newest schema."""

    def __init__(self, url: str) -> None:
        migrate(url)
        self._readers = _reading_engine(url)
        self._writer = _writing_engine(url)
        self._queue: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._turns = count()
        self._closed = False
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._write_on, name="store-writer", daemon=True)
        self._thread.start()

    def write(
        self, work: Callable[[sa.Connection], Result], urgency: Urgency = Urgency.FACT
    ) -> Future[Result]:
        """Run ``work`` in a transaction; the answer comes when it is durable.

        What ``work`` raises undoes it alone and is the answer. It must not call out or wait.
        """
        answer: Future[Result] = Future()
        with self._gate:
            if self._closed:
                raise StoreError("the store is closed")
            self._queue.put(_Waiting(urgency, next(self._turns), work, answer))
        return answer

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that cannot write; all it reads is of one moment."""
        with self._readers.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Finish what waits, then close. Readers go first: the last to leave tidies the WAL."""
        with self._gate:
            self._closed = True
            self._queue.put(_Waiting(max(Urgency) + 1, next(self._turns), None, Future()))
        self._thread.join()
        self._readers.dispose()
        self._writer.dispose()

    def _write_on(self) -> None:
        with self._writer.connect() as connection:
            over = False
            while not over:
                batch = [self._queue.get()]
                while len(batch) < _BATCH and not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                over = any(waiting.work is None for waiting in batch)
                _carry_out(connection, [waiting for waiting in batch if waiting.work])


def _carry_out(connection: sa.Connection, batch: Sequence[_Waiting]) -> None:
    """All works of ``batch`` in one transaction, each in a savepoint; answers after the commit."""
    done: list[tuple[Future[Any], Any]] = []
    try:
        with connection.begin():
            for waiting in batch:
                assert waiting.work
                try:
                    with connection.begin_nested():
                        result = waiting.work(connection)
                except Exception as error:
                    if connection.invalidated:
                        raise
                    waiting.answer.set_exception(error)
                else:
                    done.append((waiting.answer, result))
    except Exception as error:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        return
    for answer, result in done:
        answer.set_result(result)


# ---- engines


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _reading_engine(url: str) -> sa.Engine:
    if sa.make_url(url).get_backend_name() != "sqlite":
        return sa.create_engine(
            url,
            json_serializer=_json,
            isolation_level="REPEATABLE READ",
            connect_args={"options": "-c default_transaction_read_only=on"},
            pool_size=10,
            max_overflow=40,
            pool_pre_ping=True,
        )
    engine = sa.create_engine(url, json_serializer=_json, pool_size=10, max_overflow=40)
    return _sqlite(engine, "BEGIN", (*_PRAGMAS, "query_only=ON"))


def _writing_engine(url: str, *, foreign_keys: bool = True) -> sa.Engine:
    engine = sa.create_engine(url, json_serializer=_json, poolclass=sa.NullPool)
    if engine.dialect.name != "sqlite":
        return engine
    keys = f"foreign_keys={'ON' if foreign_keys else 'OFF'}"
    return _sqlite(engine, "BEGIN IMMEDIATE", (*_PRAGMAS, keys))


def _sqlite(engine: sa.Engine, begin: str, pragmas: Sequence[str]) -> sa.Engine:
    """Take transactions out of the driver's hands: it would begin them late, and never for DDL."""

    @sa.event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin_now(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


# ---- migrations


def alembic_config(connection: sa.Connection) -> Config:
    """Alembic, told by hand: in an installed copy there is no pyproject.toml to read."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def migrate(url: str, to: str = "head") -> None:
    """Bring the schema to ``to``, in one transaction, after a copy of a file that has data.

    Raises :class:`StoreError` when the database is newer than this program.
    """
    engine = _writing_engine(url, foreign_keys=False)
    try:
        with engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
            scripts = ScriptDirectory.from_config(alembic_config(connection))
        known = {script.revision for script in scripts.walk_revisions()}
        if current is not None and current not in known:
            raise StoreError(
                f"the database is at revision {current}, which this version does not know:"
                " it was made by a newer one. Start that one, or give another --data"
            )
        if to == "head" and current == scripts.get_current_head():
            return
        if current is not None and engine.dialect.name == "sqlite":
            _copy(engine, current)
        with engine.begin() as connection:
            config = alembic_config(connection)
            down = to == "base" or (
                to in known and current is not None and _older(scripts, to, current)
            )
            (command.downgrade if down else command.upgrade)(config, to)
            if engine.dialect.name == "sqlite":
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if broken:
                    raise StoreError(
                        f"the migration would leave rows without parents: {broken[:3]}"
                    )
    finally:
        engine.dispose()


def _older(scripts: ScriptDirectory, revision: str, current: str) -> bool:
    below = {script.revision for script in scripts.iterate_revisions(current, "base")}
    return revision in below and revision != current


def _copy(engine: sa.Engine, revision: str) -> None:
    """``varuna.db`` -> ``varuna.db.at-<revision>``, whole; an older copy of the same name stays."""
    file = Path(str(engine.url.database))
    copy = file.with_name(f"{file.name}.at-{revision}")
    if not copy.exists():
        part = copy.with_name(f"{copy.name}.part")
        part.unlink(missing_ok=True)
        with sqlite3.connect(file) as connection:
            connection.execute("VACUUM INTO ?", (str(part),))
        connection.close()
        part.rename(copy)
