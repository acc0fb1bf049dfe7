"""The SQL database of a server: a table with one row a task, and one with a row of the server.

This module alone depends on SQLite. The tables and statements are those of SQLAlchemy Core, and
`migrations` has the steps from one version of the tables to the next (Alembic).
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

# The version of the tables, which the newest file in `migrations/versions` has.
REVISION = "0001"
METADATA = MetaData()
_Json = JSON(none_as_null=True)


def _meter() -> list[Column]:
    """The columns of a `Meter`."""
    types = {int: BigInteger, float: Double}
    return [Column(f.name, types[f.type], nullable=False) for f in dataclasses.fields(Meter)]


# `LiveTask.first_row` and `LiveTask.row` make all columns but two: "id" has the order of the
# registrations, and "checkpoint" the number of the last checkpoint with the task.
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
    # A number is never used again, so tasks that came later have higher ones.
    sqlite_autoincrement=True,
)
# `checkpoints` is the number of checkpoints that have been written; the last two columns have the
# lengths of events.jsonl and rounds.jsonl.
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
# Of Alembic: the version that the tables have.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String))

# By error code of SQLite (https://www.sqlite.org/rescode.html), without its extension, the errno
# with the same meaning.
_ERRORS = {5: errno.EBUSY, 8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC}
# The codes that tell of a damaged file.
_DAMAGED = {11, 26}
# Milliseconds for which a write waits while another process, such as a backup, holds a lock.
_BUSY_MILLISECONDS = 10_000


class Rows(NamedTuple):
    """What a transaction changes in the table of tasks.

    Attributes:
      new: the columns of new tasks, by name.
      changed: by key of the task, the columns that change.
      forgotten: the keys of rows to delete. New tasks may have the names of these.
    """

    new: Sequence[Mapping[str, Any]] = ()
    changed: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    forgotten: Sequence[str] = ()


class Checkpoint(NamedTuple):
    """A checkpoint that has been written.

    Attributes:
      number: its number.
      keys: the keys of its tasks.
    """

    number: int
    keys: Sequence[str]


class Database:
    """The database of a server, in a file of its folder. One thread at a time uses it."""

    def __init__(self, path: Path):
        """Opens the database, or creates it, and brings its tables to the present version.

        Args:
          path: its file.

        Raises:
          RunDirectoryError: it is damaged, or a later version of jaxmux has written it.
          OSError: it cannot be written.
        """
        self._path = path
        self._engine = _engine(path)
        try:
            with self._errors():
                with self._engine.begin() as connection:
                    _migrate(connection, path)
                # SQLite does not sync the name of this file.
                sync(path.parent)
                self._connection = self._engine.connect()
        except BaseException:
            self._engine.dispose()
            raise

    def read(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The rows of the tasks in the order of their registration, and that of the server, which
        is None before the first `write`.

        Raises:
          RunDirectoryError: the file is damaged.
          OSError: it cannot be read.
        """
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
        """Writes rows in one transaction, which is on disk afterwards.

        Args:
          tasks: the rows of tasks.
          server: the columns of the server by name.
          checkpoint: a new checkpoint; its number is stored in the rows of its tasks.

        Raises:
          OSError: nothing is written.
          RunDirectoryError: the file is damaged.
        """
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
        """Closes the file."""
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises the errors of the database as those of the system."""
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
        # Its own message would quote the values of the statement.
        return OSError(errno.EIO, str(error.orig), str(self._path))


def unusable(path: Path, why: str) -> RunDirectoryError:
    """The error for a file or folder of a server without which its tasks cannot go on.

    Args:
      path: the file or folder, which lies in the server's folder itself.
      why: what is wrong with it.
    """
    return RunDirectoryError(
        f"{path}: {why}; restore the folder {path.parent} from a backup, or delete the whole "
        "folder to begin anew"
    )


def read_origin(path: Path, name: str) -> dict[str, Any] | None:
    """The specification of a task as its tenant wrote it, from the database of a server that may be
    running; None if there is none.

    Args:
      path: file of the database.
      name: name of the task.
    """
    engine = _engine(path, reads=True)
    try:
        with engine.connect() as connection:
            return connection.execute(select(TASKS.c.origin).where(TASKS.c.name == name)).scalar()
    except (DBAPIError, ValueError):
        # There is no database, or none of this version, or it is damaged.
        return None
    finally:
        engine.dispose()


def _engine(path: Path, reads: bool = False) -> Engine:
    """What makes connections to the database."""
    query = {"mode": "ro" if reads else "rwc", "uri": "true"}
    if reads and not path.with_name(f"{path.name}-wal").exists():
        # Nobody writes to it. SQLite would create files beside it, or fail where it must not.
        query["immutable"] = "1"
    file = f"file:{quote(str(path.absolute()))}"
    url = URL.create("sqlite", database=file, query=query)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        # The driver would begin no transaction for statements that define tables.
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
    # Only a new version needs Alembic, whose import takes half a second.
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
