"""The SQL database of a server: a table with one row per task, and a table with one row for the
server.

Only this module depends on SQLite. Tables and statements use SQLAlchemy Core; `migrations` has the
steps from one version of the tables to the next (Alembic).
"""

import dataclasses
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError

from jaxmux.atomic_files import sync
from jaxmux.runs.run_directory import RunDirectoryError

from .task import Meter

# The version of the tables, which the newest file in `migrations/versions` creates.
REVISION = "0001"
METADATA = MetaData()
_Json = JSON(none_as_null=True)


def _meter() -> list[Column]:
    types = {int: BigInteger, float: Double}
    return [Column(f.name, types[f.type], nullable=False) for f in dataclasses.fields(Meter)]


# `LiveTask.first_row` and `LiveTask.row` make all columns but two: "id" is the order of the
# registrations, and "checkpoint" the number of the last checkpoint that has the task.
TASKS = Table(
    "tasks",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("key", String, nullable=False, unique=True),
    Column("name", String, nullable=False, unique=True),
    Column("specification", _Json, nullable=False),
    Column("origin", _Json),
    Column("arrival", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("passes", BigInteger, nullable=False),
    Column("steps", BigInteger),
    Column("extensions", _Json, nullable=False),
    Column("files", _Json, nullable=False),
    Column("fingerprints", _Json, nullable=False),
    Column("history", _Json, nullable=False),
    Column("warnings", _Json, nullable=False),
    Column("progress", _Json),
    Column("counted", _Json, nullable=False),
    Column("told", Boolean, nullable=False),
    Column("checkpoint", BigInteger),
    *_meter(),
    # An id is never used again, so later tasks have higher ids.
    sqlite_autoincrement=True,
)
# `checkpoints` is the number of checkpoints that have been written. `events_bytes` and
# `rounds_bytes` are the lengths of events.jsonl and rounds.jsonl.
SERVER = Table(
    "server",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("rounds", BigInteger, nullable=False),
    Column("checkpoints", BigInteger, nullable=False),
    Column("events_bytes", BigInteger, nullable=False),
    Column("rounds_bytes", BigInteger, nullable=False),
    *_meter(),
)
# Alembic's table with the version of the other tables.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String))

# For each error code of SQLite without its extension (https://www.sqlite.org/rescode.html), the
# errno with the same meaning.
_ERRORS = {5: errno.EBUSY, 8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC}
# The error codes of a damaged file.
_DAMAGED = {11, 26}
# Milliseconds for which a write waits while another process, such as a backup, holds a lock.
_BUSY_MILLISECONDS = 10_000


class Rows(NamedTuple):
    """The changes that a transaction makes in the table of tasks.

    Attributes:
      new: the columns of new tasks, by name.
      changed: by key of the task, the columns that change.
      forgotten: the keys of rows to delete. New tasks may have the names of these.
    """

    new: Sequence[Mapping[str, Any]] = ()
    changed: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    forgotten: Sequence[str] = ()


class Checkpoint(NamedTuple):
    """A checkpoint that has been written: its number, and the keys of its tasks."""

    number: int
    keys: Sequence[str]


class Database:
    """The database of a server, in a file of its folder. Only one thread at a time may use it."""

    def __init__(self, path: Path):
        """Opens the database, or creates it, and brings its tables to the present version. Raises
        RunDirectoryError if the file is damaged or was written by a later version of jaxmux, and
        OSError if it cannot be written."""
        self._path = path
        self._engine = _engine(path)
        try:
            with self._errors():
                with self._engine.begin() as connection:
                    _migrate(connection, path)
                # SQLite does not sync the directory entry of this file.
                sync(path.parent)
                self._connection = self._engine.connect()
        except BaseException:
            self._engine.dispose()
            raise

    def read(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The rows of the tasks in the order of their registration, and the row of the server,
        which is None before the first `write`. Raises RunDirectoryError if the file is damaged, and
        OSError if it cannot be read."""
        try:
            with self._errors(), self._connection.begin():
                rows = self._connection.execute(select(TASKS).order_by(TASKS.c.id)).mappings().all()
                server = self._connection.execute(select(SERVER)).mappings().first()
        except ValueError as e:
            raise unusable(self._path, f"damaged ({e})") from None
        return [dict(row) for row in rows], server and dict(server)

    def write(
        self,
        tasks: Rows,
        server: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Writes rows in one transaction, which is then on disk. `server` has the columns of the
        server by name. The number of a new checkpoint is stored in the rows of its tasks. If it
        raises OSError, nothing is written; it raises RunDirectoryError if the file is damaged."""
        is_its_row = TASKS.c.key == bindparam("its_key")
        with self._errors(), self._connection.begin():
            execute = self._connection.execute
            if tasks.forgotten:
                execute(delete(TASKS).where(TASKS.c.key.in_(tasks.forgotten)))
            if tasks.changed:
                rows = [{"its_key": key, **row} for key, row in tasks.changed.items()]
                execute(update(TASKS).where(is_its_row), rows)
            for row in tasks.new:
                execute(insert(TASKS).values(**row))
            if checkpoint and checkpoint.keys:
                has_number = update(TASKS).where(is_its_row).values(checkpoint=checkpoint.number)
                execute(has_number, [{"its_key": key} for key in checkpoint.keys])
            if not execute(update(SERVER).values(**server)).rowcount:
                execute(insert(SERVER).values(**server))

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises errors of the database as OSError or RunDirectoryError."""
        try:
            yield
        except DBAPIError as e:
            raise self._error(e) from None

    def _error(self, error: DBAPIError) -> Exception:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            return unusable(self._path, f"damaged ({error.orig})")
        if code in _ERRORS:
            return OSError(_ERRORS[code], os.strerror(_ERRORS[code]), str(self._path))
        # SQLAlchemy's message would quote the values of the statement.
        return OSError(errno.EIO, str(error.orig), str(self._path))


def unusable(path: Path, why: str) -> RunDirectoryError:
    """The error that a file or folder of a server cannot be used, without which its tasks cannot go
    on. `path` lies directly in the server's folder."""
    return RunDirectoryError(
        f"{path}: {why}; restore the folder {path.parent} from a backup, or delete the whole "
        "folder to begin anew"
    )


def read_origin(path: Path, name: str) -> dict[str, Any] | None:
    """The specification of a task as its tenant wrote it, from the database of a server that may be
    running; None if there is none."""
    engine = _engine(path, reads=True)
    try:
        with engine.connect() as connection:
            return connection.execute(select(TASKS.c.origin).where(TASKS.c.name == name)).scalar()
    except (DBAPIError, ValueError):
        # The database does not exist, has another version, or is damaged.
        return None
    finally:
        engine.dispose()


def _engine(path: Path, reads: bool = False) -> Engine:
    """The SQLAlchemy engine, which makes connections to the database."""
    query = {"mode": "ro" if reads else "rwc", "uri": "true"}
    if reads and not path.with_name(f"{path.name}-wal").exists():
        # No process writes to the database. SQLite would create files beside it, or fail where it
        # must not.
        query["immutable"] = "1"
    file = f"file:{quote(str(path.absolute()))}"
    url = URL.create("sqlite", database=file, query=query)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        # Otherwise the driver begins no transaction for statements that define tables.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        if not reads:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _migrate(connection: Connection, path: Path) -> None:
    """Brings the tables to the present version."""
    has_version = connection.dialect.has_table(connection, _VERSION.name)
    found = connection.execute(select(_VERSION.c.version_num)).scalar() if has_version else None
    if found == REVISION:
        return
    # Imported here because the import takes half a second and only a new version needs it.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        command.upgrade(config, REVISION)
    except CommandError:
        raise RunDirectoryError(
            f"{path}: its tables have version {found}, and this version of jaxmux knows those up "
            f"to {REVISION}; use the version that wrote it"
        ) from None
