"""The records of the benchmarks, which all have the same fields, their files, and Markdown
tables."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# Text in place of a table without records.
NOT_MEASURED = "Not measured yet.\n"

# A field that does not apply to a benchmark is None. Times (`ms_...`) are in milliseconds. Each
# benchmark describes its `ratio`.
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
    """A record with all of `FIELDS` in their order, followed by any other given fields.

    The default of `command` is the command line of this process; other fields are None by default.
    """
    values.setdefault("command", shlex.join(["python", *sys.argv]))
    return {field: values.pop(field, None) for field in FIELDS} | values


def make_figure(
    name: str,
    value: float,
    bound: float | None,
    unit: str,
    baselines: dict[str, Any],
    *,
    device: str,
    versions: dict[str, str],
    sense: str = "at most",
    command: str | None = None,
) -> Record:
    """The record of one figure with its bound, and what it was made from.

    The default of `command` is the command line of this process.
    """
    return {
        "name": name,
        "value": value,
        "bound": bound,
        "sense": sense,
        "unit": unit,
        "command": command or shlex.join(["python", *sys.argv]),
        "device": device,
        "versions": versions,
        "baselines": baselines,
    }


def limit(figure: Record, form: str = "g") -> str:
    """The bound of a figure in words."""
    bound = figure["bound"]
    return "none" if bound is None else f"{figure['sense']} {bound:{form}}"


def figures_table(
    figures: Sequence[Record], head: Sequence[str], rows: Sequence[Sequence[Any]]
) -> str:
    """A Markdown table of figures, below their commands, devices and versions."""
    devices = dict.fromkeys(figure["device"] for figure in figures)
    versions = dict.fromkeys(f"jax {figure['versions']['jax']}" for figure in figures)
    made_on = ", ".join([*devices, *versions])
    return f"{commands(figures)}{made_on}.\n\n{markdown(head, rows)}"


def read_records(path: Path) -> list[Record]:
    return json.loads(path.read_text())


def shown(value: Any) -> str:
    """Text for tables; floats have four significant digits, and large ones all before the point."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def commands(records: Sequence[Record]) -> str:
    """A Markdown code block with the commands of the records, each once."""
    lines = "\n".join(dict.fromkeys(r["command"] for r in records))
    return f"```\n{lines}\n```\n\n"


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, or a sentence if it has no rows."""
    if not rows:
        return NOT_MEASURED
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


class RecordFile:
    """A JSON file with a list of records, written again after every added record.

    Args:
      path: the file; its folder is created.
      append: keep the records that the file has, for a benchmark that takes several calls.
    """

    def __init__(self, path: Path, append: bool = False):
        self._path = path
        self._records = read_records(path) if append and path.exists() else []

    def add(self, *records: Record) -> None:
        """Adds the records that the file does not have yet."""
        self._records += [record for record in records if record not in self._records]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(_dump(self._records))


def replace_records(path: Path, prefix: str | tuple[str, ...], records: Sequence[Record]) -> None:
    """Writes records into a file that several benchmarks share.

    Args:
      path: a JSON file with a list of records; it and its folder are created.
      prefix: the beginning of the names of all records of this benchmark, or several. Records of
        the file with such names are removed; the others are kept.
      records: the new records.
    """
    found = read_records(path) if path.exists() else []
    kept = [record for record in found if not record["name"].startswith(prefix)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump([*kept, *records]))


def _dump(records: Sequence[Record]) -> str:
    """JSON with one field per line, also if the value of the field is a list or a dict."""
    lines = (
        ",\n".join(f"  {json.dumps(field)}: {json.dumps(value)}" for field, value in record.items())
        for record in records
    )
    return "[" + ",".join(f"\n {{\n{text}\n }}" for text in lines) + "\n]\n"
