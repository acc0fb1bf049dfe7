"""Records of JSON arrays, tables, compressed files and patterns of names."""

import csv
import gzip
import json
import random
import re
import sys
from pathlib import Path

import pytest

from jaxmux.data import DataError, Source, file_kinds, json_arrays, read_records

ROWS = [{"text": "one"}, {"text": 'zwei, "drei"\n–'}, {"text": "", "more": [1, {"a": None}]}]


def read(path, **options) -> list:
    return list(read_records(Source(str(path), **options)))


def fields(path, **options) -> list:
    return [record.fields for record in read(path, **options)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_an_array_of_a_json_file_gives_the_records_of_jsonl(tmp_path, indent, encoding):
    path = tmp_path / "a.json"
    path.write_text(" \n" + json.dumps(ROWS, indent=indent) + "\n", encoding=encoding)
    if encoding == "utf-8-sig":
        path.write_text(json.dumps(ROWS, indent=indent), encoding=encoding)
    found = read(path)
    assert [r.fields for r in found] == ROWS
    assert [(r.index, r.where) for r in found] == [(n, f"{path}:{n + 1}") for n in range(3)]


def test_a_json_file_with_one_object_per_line_is_read_as_ever(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\n".join(["", *map(json.dumps, ROWS)]))
    assert [r.where for r in read(path)] == [f"{path}:{n}" for n in (2, 3, 4)]


def test_arrays_are_read_in_parts_of_any_size(tmp_path, monkeypatch):
    """Elements, separators and escapes lie across the ends of the parts that are read."""
    path, rng = tmp_path / "a.json", random.Random(0)
    for chunk in (1, 2, 3, 7, 50):
        monkeypatch.setattr(json_arrays, "_CHUNK", chunk)
        rows = [
            {"text": 'é\\"\n{[]},' * rng.randrange(5), "n": rng.random() * 10**9, "l": [[], {}]}
            for _ in range(rng.randrange(1, 6))
        ]
        path.write_text(json.dumps(rows, indent=rng.choice([None, 1]), ensure_ascii=chunk > 2))
        assert fields(path) == rows


def test_elements_that_are_no_objects_can_be_left_out(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, 12345, "b", [], null, {"text": "c"} ]')
    with pytest.raises(DataError, match=re.escape(f"{path}:2: expected a JSON object, found int")):
        read(path)
    for chunk in (2, 2**20):
        monkeypatch.setattr(json_arrays, "_CHUNK", chunk)
        skipped = []
        found = list(read_records(Source(str(path), on_bad_record="skip"), skipped.append))
        assert [r.index for r in found] == [0, 5]
        assert [str(e).rpartition(" ")[2] for e in skipped] == ["int", "str", "list", "NoneType"]


def assert_refused(path, text, problem):
    """Also where malformed records may be left out."""
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}{problem}"):
        read(path, on_bad_record="skip")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", ": no records"),
        ("[", ":1: malformed JSON"),
        ('[{"text": "a"}', ":2: expected ',' or ']' behind element 1, the file ends"),
        ('[{"text": "a"} {"text": "b"}]', ":2: expected ',' or ']' behind element 1, found '{'"),
        ('[{"text": "a"},]', ":2: malformed JSON"),
        ('[,{"text": "a"}]', ":1: malformed JSON"),
        ('[{"text": "a"}, {"text": "b"', ":2: malformed JSON"),
        ('[{"text": "a"}, {"text" "b"}]', ":2: malformed JSON: .* at character 9"),
        ('[{"text": "a"}] []', ": there is more text behind the end of the array"),
        ("[" * 100_000, ":1: malformed JSON"),
        ('[{"text": "caf\udce9"}]', ": cannot be read: 'utf-8' codec"),
    ],
)
def test_a_malformed_array_is_refused_even_if_records_may_be_left_out(tmp_path, text, problem):
    assert_refused(tmp_path / "a.json", text, problem)


def test_an_element_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_arrays, "_CHUNK", 10)
    monkeypatch.setattr(json_arrays, "_LONGEST", 100)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "' + "a" * 1000)
    with pytest.raises(DataError, match=":1: malformed JSON: .*, or longer than 100 characters$"):
        read(path)


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_rows_of_a_table_are_records(tmp_path, suffix, delimiter):
    path = tmp_path / f"a{suffix}"
    rows = [
        {"prompt": 'a,"b"\tc\nd', "completion": "–\ry"},
        {"prompt": "x" * 200_000, "completion": "u\u2028v\x0cw\x85x"},
    ]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
        writer.writeheader()
        writer.writerow(rows[0])
        file.write("\r\n")
        writer.writerow(rows[1])
    found = read(path)
    assert [r.fields for r in found] == rows
    assert [r.where for r in found] == [f"{path}:2", f"{path}:5"]


def test_rows_of_another_length_than_the_header_can_be_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,n\na,1\nb\nc,2,3\nd,4\n")
    with pytest.raises(DataError, match=f"{path}:3: has 1 fields, but the header has 2"):
        read(path)
    assert [r.index for r in read(path, on_bad_record="skip")] == [0, 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": no records"),
        ("text\n", ": no records"),
        ("text,n,text\na,1,b\n", ":1: the header names the column 'text' twice"),
        ('text\na\n"b', ":3: malformed row: unexpected end of data"),
        ('text\n"a"b\n', ":2: malformed row"),
        ("text\na\rb\n", r":2: malformed row: a carriage return \(\\r\) stands outside of quotes"),
        ("text\ncaf\udce9\n", ": cannot be read: 'utf-8' codec"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, text, problem):
    assert_refused(tmp_path / "a.csv", text, problem)


def zstd():
    try:
        from compression import zstd
    except ModuleNotFoundError:
        return pytest.importorskip("backports.zstd")
    return zstd


CONTENTS = {
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "json": json.dumps(ROWS),
    "csv": "text\none\n",
}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_compressed_files_are_read_like_others(tmp_path, kind, suffix):
    compress = gzip.compress if suffix == ".gz" else zstd().compress
    plain, path = tmp_path / f"a.{kind}", tmp_path / f"a.{kind}{suffix}"
    plain.write_text(CONTENTS[kind])
    data = compress(plain.read_bytes())
    path.write_bytes(data)
    expected = [(r.fields, r.where.replace(str(plain), str(path))) for r in read(plain)]
    assert [(r.fields, r.where) for r in read(path)] == expected
    for damaged in (data[:-4], b"x" * 20):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{path}: cannot be read: "):
            read(path)


def test_the_package_for_zstd_is_named(tmp_path, monkeypatch):
    for name in ("compression", "backports"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(DataError, match=r"a.jsonl.zst: .* pip install backports\.zstd"):
        read(tmp_path / "a.jsonl.zst")
    assert (
        "pip install backports.zstd"
        in (Path(__file__).parents[2] / "docs" / "your_data.md").read_text()
    )


@pytest.mark.parametrize("name", ["a.gz", "a.txt.gz", "a.parquet.gz", "a.jsonl.bz2", "a"])
def test_other_suffixes_are_refused_with_those_that_are_read(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name}: unknown kind of file .*.jsonl, .json, .csv"):
        read(tmp_path / name)


def test_a_pattern_stands_for_its_files_in_the_order_of_their_names(tmp_path, write_jsonl):
    folder = tmp_path / "[x]"
    folder.mkdir()
    for name in ("part-2.jsonl", "part-1.jsonl", "other.jsonl"):
        write_jsonl({"text": name}, name=f"[x]/{name}")
    (folder / "part-3.csv").write_text("text\npart-3.csv\n")
    (folder / "part-4.jsonl").mkdir()
    found = read(folder / "part-?.*")
    assert [r.fields["text"] for r in found] == ["part-1.jsonl", "part-2.jsonl", "part-3.csv"]
    assert [r.index for r in found] == [0, 1, 2]
    assert [r.where for r in found][1:] == [f"{folder}/part-2.jsonl:1", f"{folder}/part-3.csv:2"]
    with pytest.raises(DataError, match=re.escape(f"{folder}/none-*.jsonl: no file matches")):
        read(folder / "none-*.jsonl")
    with pytest.raises(DataError, match="split='test', but this source has no splits"):
        read(folder / "part-*", split="test")
    write_jsonl("{", name="[x]/part-5.jsonl")
    with pytest.raises(DataError, match="part-5.jsonl:1: malformed"):
        read(folder / "part-*")


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path, write_jsonl):
    write_jsonl({"text": "a"}, name="a*.jsonl")
    write_jsonl({"text": "b"}, name="ab.jsonl")
    assert fields(tmp_path / "a*.jsonl") == [{"text": "a"}]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(file_kinds, "_LONGEST", 20)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "a" * 1000)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: the line is longer than 20 bytes")):
        read(path)


def call(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def tool(name: str, properties: dict) -> dict:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


# No object of one record has all keys that those of the other one have.
NESTED = [
    {
        "messages": [
            {"role": "user", "content": "Weather in Paris?"},
            call("weather", {"city": "Paris", "days": [{"from": 1}, {"to": 2}]}),
            call("now", {}),
        ],
        "tools": [
            tool("weather", {"city": {"type": "string", "enum": ["Paris"]}}),
            tool("now", {}),
        ],
        "note": None,
    },
    {
        "messages": [call("add", {"x": 1, "y": {"value": 2.5}})],
        "tools": [tool("add", {"x": {"type": "integer"}, "y": {"type": "number", "least": 0}})],
        "note": "a",
    },
]


def test_parquet_leaves_out_nulls_that_stand_for_keys_of_other_records(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(NESTED), path, row_group_size=1)
    assert fields(path) == NESTED


def test_parquet_keeps_nulls_that_a_writer_meant(tmp_path):
    """Those of columns, of lists, of maps, and of keys that have no value anywhere."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"text": None, "l": [None, {"a": 1, "default": None}, {"b": 2, "default": None}]},
        {"text": "b", "l": None},
    ]
    maps = [{"m": [("x", None), ("y", 1)]}, {"m": None}]
    kind = pyarrow.schema([("m", pyarrow.map_(pyarrow.string(), pyarrow.int64()))])
    for name, table, expected in (
        ("a", pyarrow.Table.from_pylist(rows), rows),
        ("b", pyarrow.Table.from_pylist(maps, kind), [{"m": {"x": None, "y": 1}}, {"m": None}]),
    ):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        assert fields(tmp_path / f"{name}.parquet") == expected
