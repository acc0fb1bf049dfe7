"""Records of the benchmarks: all have the same fields and are written as they come."""

import json
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# What does not apply is None. Times are milliseconds; `ratio` is said by each benchmark.
FIELDS = (
    "name",
    "shape",
    "dtype",
    "tasks",
    "ranks",
    "dropout",
    "implementation",
    "ms_median",
    "ms_min",
    "ms_max",
    "baseline",
    "baseline_ms_median",
    "ratio",
    "tokens_per_second",
    "peak_bytes",
    "device",
    "versions",
    "command",
)


def make_record(**values: Any) -> Record:
    """A record with all of `FIELDS`, in their order, and any further field behind them.

    The command is that of this process; any other field that is not given is None.
    """
    values.setdefault("command", shlex.join(["python", *sys.argv]))
    return {field: values.pop(field, None) for field in FIELDS} | values


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_records(path: Path) -> list[Record]:
    return json.loads(path.read_text())


def shown(value: Any) -> str:
    """A value for tables: numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class RecordFile:
    """A JSON list that is complete on disk after every record.

    Args:
      path: of the file; its folder is made.
      append: whether the records that are there stay, as of a benchmark split over several calls.
    """

    def __init__(self, path: Path, append: bool = False):
        self._path = path
        self._records = read_records(path) if append and path.exists() else []

    def add(self, *records: Record) -> None:
        """Adds those that are not there yet."""
        self._records += [record for record in records if record not in self._records]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(_dump(self._records))


def _dump(records: Sequence[Record]) -> str:
    """One field a line, lists of numbers and small tables on the field's own line."""
    lines = (
        ",\n".join(f"  {json.dumps(field)}: {json.dumps(value)}" for field, value in record.items())
        for record in records
    )
    return "[" + ",".join(f"\n {{\n{text}\n }}" for text in lines) + "\n]\n"
