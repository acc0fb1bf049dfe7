"""Sources yield records in order with their places; errors name the file and the line."""

import json
import re
import sys

import pytest

from jaxmux.data import DataError, Source, read_records

RECORDS = [{"text": "one"}, {"text": "zwei – drei"}, {"text": "vier", "extra": None}]


def read(path: str, **options) -> list:
    return list(read_records(Source(path, **options)))


def test_jsonl_records_carry_index_fields_and_line(write_jsonl):
    path = write_jsonl(*RECORDS)
    records = read(path)
    assert [r.fields for r in records] == RECORDS
    assert [r.index for r in records] == [0, 1, 2]
    assert [r.where for r in records] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_blank_lines_are_skipped_but_counted_as_lines(write_jsonl):
    path = write_jsonl(RECORDS[0], "", "   ", RECORDS[1])
    assert [(r.index, r.where) for r in read(path)] == [(0, f"{path}:1"), (1, f"{path}:4")]


def test_byte_order_mark_is_not_part_of_the_first_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(RECORDS[0]), encoding="utf-8-sig")
    assert read(str(path))[0].fields == RECORDS[0]


def test_parquet_gives_the_same_records_as_jsonl(write_jsonl, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = read(str(path))
    assert [r.fields for r in records] == [r.fields for r in read(write_jsonl(*rows))]
    assert records[1].where == f"{path}:2"


def test_saved_hugging_face_dataset_gives_its_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict({"train": split, "test": split.select([1])}).save_to_disk(tmp_path)
    path = f"hf:{tmp_path}"
    assert [r.fields for r in read(path)] == [{"text": "a"}, {"text": "b"}]
    assert [r.fields for r in read(path, split="test")] == [{"text": "b"}]
    with pytest.raises(DataError, match="no split 'valid'; found splits: 'train', 'test'"):
        read(path, split="valid")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', "malformed JSON line"),
        ('["a", "b"]', "expected a JSON object, found list"),
        ("[" * 100_000, "malformed JSON line"),
        ("[", "not an array"),
    ],
)
def test_bad_line_is_named_by_file_and_line(write_jsonl, line, problem):
    path = write_jsonl(RECORDS[0], line)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: ") + f".*{problem}"):
        read(path)


def test_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=re.escape(f"{path}:2: malformed")):
        read(str(path))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(f"{path}: no records")):
        read(str(path))


def test_missing_file_folder_and_unknown_suffix_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl: file not found"):
        read(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="folder.jsonl: is not a file"):
        read(str(tmp_path / "folder.jsonl"))
    with pytest.raises(DataError, match=r"notes.txt: unknown kind of file '.txt'"):
        read(str(tmp_path / "notes.txt"))


def test_split_of_a_file_is_refused_rather_than_ignored(write_jsonl):
    with pytest.raises(DataError, match="split='test', but this source has no splits"):
        read(write_jsonl(*RECORDS), split="test")


def test_corrupt_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="broken.parquet: cannot be read as Parquet"):
        read(str(path))


@pytest.mark.parametrize(
    ("path", "package", "extra"),
    [("a.parquet", "pyarrow", "pyarrow"), ("hf:some/set", "datasets", "datasets")],
)
def test_missing_optional_package_names_its_extra(tmp_path, monkeypatch, path, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=f"pip install {extra}"):
        read(path)


@pytest.mark.parametrize(
    "option", [{"form": "alpacca"}, {"loss_on": "prompt"}, {"overlong": "wrap"}]
)
def test_unknown_option_value_is_refused_with_the_permitted_ones(option):
    ((name, value),) = option.items()
    with pytest.raises(DataError, match=f"a.jsonl: {name} should be one of '.*, found '{value}'"):
        Source("a.jsonl", **option)
