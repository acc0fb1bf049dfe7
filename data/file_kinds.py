"""Readers of files: JSONL, JSON arrays, CSV, TSV, Parquet, compressed files, and patterns of names.

A reader yields the location of each record and its fields. For a malformed line, it yields the
error instead of the fields, so that the line can be left out. If the rest of the file cannot be
read, it raises the error.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from glob import glob
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from .errors import DataError
from .json_arrays import begins_array, read_array

Rows = Iterator[tuple[str, Mapping[str, Any] | DataError]]

JSONL_SUFFIXES = (".jsonl", ".json")
_PARQUET = ".parquet"
_ZSTD = ".zst"
_COMPRESSED = (".gz", _ZSTD)
# A JSON array must begin within this number of bytes.
_HEAD = 2**16
# Maximum number of bytes of a line, and of characters of a field of a CSV file. The default of the
# csv module, 2**17, is too small for text.
_LONGEST = 2**26
# Number of rows of a Parquet file, and of bytes of its buffer, that are read at the same time.
_ROWS = 512
_BUFFER = 2**20


def is_pattern(path: str) -> bool:
    """Whether a path is a pattern with "*" or "?" and not the path of an existing file."""
    return ("*" in path or "?" in path) and not Path(path).exists()


def files_of(path: str) -> list[str]:
    """The files that a path names: the path itself, or the files that match a pattern, sorted by
    name. "*" matches any characters but "/", and "?" matches one."""
    if not is_pattern(path):
        return [path]
    # Brackets are common in names, so they match themselves.
    return sorted(file for file in glob(path.replace("[", "[[]")) if Path(file).is_file())


def read_file(path: Path) -> Rows:
    """Reads a file, whose suffixes determine its kind. Raises DataError if the file is missing,
    unreadable or of an unknown kind, or the optional package for this kind is not installed."""
    is_compressed = path.suffix in _COMPRESSED
    kind = Path(path.stem).suffix if is_compressed else path.suffix
    if kind not in _READERS and (is_compressed or kind != _PARQUET):
        raise DataError(
            f"{path}: unknown kind of file {kind + path.suffix * is_compressed!r}; expected "
            f"{', '.join(_READERS)}, the same with {' or '.join(_COMPRESSED)} behind it, or "
            f'{_PARQUET}, or "hf:NAME" for a Hugging Face dataset'
        )
    if not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'file not found'}")
    return _read_parquet(path) if kind == _PARQUET else _read_stream(path, _READERS[kind])


def _read_stream(path: Path, reader: Callable[[BinaryIO, Path], Rows]) -> Rows:
    zstd = _zstd_module(path) if path.suffix == _ZSTD else None
    errors = [OSError, EOFError, zlib.error, UnicodeDecodeError]
    errors += [zstd.ZstdError] if zstd else []
    try:
        with _opened(path, zstd) as stream:
            yield from reader(stream, path)
    except tuple(errors) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _opened(path: Path, zstd: ModuleType | None) -> BinaryIO:
    if zstd:
        return zstd.open(path, "rb")
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _zstd_module(path: Path) -> ModuleType:
    try:
        from compression import zstd  # since Python 3.14
    except ModuleNotFoundError:
        try:
            from backports import zstd
        except ModuleNotFoundError as error:
            raise DataError(
                f"{path}: before Python 3.14, {_ZSTD} files need the package backports.zstd: "
                "pip install backports.zstd"
            ) from error
    return zstd


def _read_jsonl(stream: BinaryIO, path: Path) -> Rows:
    lines = iter(partial(stream.readline, _LONGEST + 1), b"")
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if len(line) > _LONGEST:
            raise DataError(f"{where}: the line is longer than {_LONGEST} bytes")
        if line.strip():
            yield where, _parse_object(line, where)


def _parse_object(line: bytes, where: str) -> Mapping[str, Any] | DataError:
    try:
        fields = json.loads(line.decode("utf-8-sig").rstrip(" \t\r\n"))
    except (ValueError, RecursionError) as error:
        is_array = line.strip() == b"["
        hint = "; write one object per line, not an array" if is_array else ""
        problem = error
        if isinstance(error, json.JSONDecodeError):
            # The decoder's message contains a line number, which is always 1 here and would
            # mislead.
            problem = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        return DataError(f"{where}: malformed JSON line: {problem}{hint}")
    if not isinstance(fields, dict):
        return DataError(f"{where}: expected a JSON object, found {type(fields).__name__}")
    return fields


def _read_json(stream: BinaryIO, path: Path) -> Rows:
    """Reads a .json file, which holds one object per line or an array of objects."""
    is_array = begins_array(stream.read(_HEAD))
    stream.seek(0)
    if is_array:
        return read_array(TextIOWrapper(stream, encoding="utf-8-sig", newline="\n"), path)
    return _read_jsonl(stream, path)


def _read_table(stream: BinaryIO, path: Path, delimiter: str) -> Rows:
    # This limit applies to the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST))
    # Lines end only with LF or CRLF; the csv module refuses other carriage returns outside quotes.
    lines = TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    before = 0
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            problem = str(error)
            if problem.startswith("new-line character seen in unquoted field"):
                problem = (
                    "a carriage return (\\r) stands outside of quotes; lines end in \\n or \\r\\n"
                )
            raise DataError(f"{path}:{before + 1}: malformed row: {problem}") from error
        if row is None:
            return
        # A row may span several lines; messages name its first line.
        where, before = f"{path}:{before + 1}", rows.line_num
        if row and not header:
            header = row
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise DataError(f"{where}: the header names the column {twice!r} twice")
        elif row and len(row) != len(header):
            yield (
                where,
                DataError(f"{where}: has {len(row)} fields, but the header has {len(header)}"),
            )
        elif row:
            yield where, dict(zip(header, row, strict=True))


def nested_columns(schema: Any) -> dict[str, Any]:
    """The Arrow types, by name, of the columns of a schema that hold objects or lists."""
    from pyarrow import types

    return {column.name: column.type for column in schema if types.is_nested(column.type)}


def without_padding(fields: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the nulls that Arrow adds to a record of a columnar file, as far as this can be
    determined.

    All objects in a column have the same keys, so an object has null for keys that only other
    objects have. These nulls are left out, at any depth. A key whose value is null in every object
    of the file stays, because its author must have written it. Columns that are null also stay.
    Maps become objects.

    Args:
      fields: the values by column, as Arrow gives them.
      columns: the Arrow types by column, from `nested_columns`.
    """
    return {name: _unpadded(value, columns.get(name)) for name, value in fields.items()}


def _unpadded(value: Any, kind: Any) -> Any:
    from pyarrow import types

    if value is None or kind is None:
        return value
    if types.is_struct(kind) and isinstance(value, Mapping):
        kept = {}
        for field in kind:
            part = value.get(field.name)
            if field.name in value and (part is not None or types.is_null(field.type)):
                kept[field.name] = _unpadded(part, field.type)
        return kept
    if types.is_map(kind) and isinstance(value, list):
        return {key: _unpadded(part, kind.item_type) for key, part in value}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_unpadded(part, kind.value_type) for part in value]
    return value


def _read_parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: Parquet files need the package pyarrow: pip install '.[parquet]' in the "
            "source folder of jaxmux"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER) as table:
            batches = table.iter_batches(_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            columns = nested_columns(table.schema_arrow)
            for number, fields in enumerate(rows, start=1):
                yield f"{path}:{number}", without_padding(fields, columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


# The readers of files that may be compressed, by suffix.
_READERS: Mapping[str, Callable[[BinaryIO, Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
}
