"""Sources yield records in order with their places; errors name the file and the line."""

import json
import re
import socket
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmux.data import DataError, Source, hugging_face, read_records

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


@pytest.fixture
def hub_without_reach(monkeypatch) -> str:
    """The address of a hub at which nobody listens; the library of the hub uses this hub."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    return endpoint


@pytest.fixture
def hub_library(monkeypatch, hub_without_reach) -> SimpleNamespace:
    """Stands in for the package datasets. Its hub is out of reach, and its cache holds one data
    set. A call that would ask the hub is an error of the test."""
    config = SimpleNamespace(HF_ENDPOINT=hub_without_reach, HF_HUB_OFFLINE=False)

    class DataSet(list):
        features = SimpleNamespace(arrow_schema=())

    def load_dataset(name: str, split: str) -> DataSet:
        assert config.HF_HUB_OFFLINE
        if (name, split) != ("in/cache", "train"):
            raise ConnectionError("offline mode is enabled")
        return DataSet([{"text": "a"}])

    library = SimpleNamespace(config=config, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def test_a_hub_that_cannot_be_reached_is_named_with_a_way_out(hub_library):
    with pytest.raises(DataError) as error:
        read("hf:some/set")
    message = str(error.value)
    assert message.startswith(
        f"hf:some/set: the hub {hub_library.config.HF_ENDPOINT} (HF_ENDPOINT)"
    )
    assert "save_to_disk" in message and '"hf:FOLDER"' in message and "\n" not in message
    assert hub_library.config.HF_HUB_OFFLINE is False


def test_a_data_set_in_the_cache_needs_no_hub(hub_library):
    assert [r.fields for r in read("hf:in/cache")] == [{"text": "a"}]


def test_the_library_of_the_hub_finds_a_cached_data_set_without_the_hub(
    tmp_path, monkeypatch, hub_without_reach, write_jsonl
):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub_without_reach)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.load_dataset("json", data_files={"train": write_jsonl({"text": "a"})})
    # The cache of a data set of the hub has the same form, but other names.
    folder = (tmp_path / "cache" / "json").rename(tmp_path / "cache" / "my___set")
    next(folder.iterdir()).rename(folder / "default")
    for arrow in folder.rglob("json-train.arrow"):
        arrow.rename(arrow.with_name("set-train.arrow"))
    for record in folder.rglob("dataset_info.json"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"config_name": "default"}))
    assert [r.fields for r in read("hf:my/set")] == [{"text": "a"}]
    with pytest.raises(DataError, match="hf:other/set: the hub .* cannot be reached"):
        read("hf:other/set")
    with pytest.raises(DataError, match="split 'test' cannot .* local cache .*Unknown split"):
        read("hf:my/set", split="test")


def test_a_hub_that_accepts_but_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(hugging_face, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        assert not hugging_face.ask_hub(f"http://127.0.0.1:{server.getsockname()[1]}")()
    assert time.monotonic() - started < 3


def test_a_hub_that_answers_is_in_reach():
    """Also with an error: another request may succeed."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    with closing(server.socket):
        assert hugging_face.ask_hub(f"http://127.0.0.1:{server.server_port}")()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', "malformed JSON line: Unterminated string starting at character 10$"),
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
    [("a.parquet", "pyarrow", "parquet"), ("hf:some/set", "datasets", "datasets")],
)
def test_missing_optional_package_is_named_with_the_documented_command(
    tmp_path, monkeypatch, path, package, extra
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    command = f"pip install '.[{extra}]'"
    with pytest.raises(DataError, match=re.escape(command)):
        read(path)
    assert command in (Path(__file__).parents[2] / "docs" / "your_data.md").read_text()


@pytest.mark.parametrize(
    "option", [{"form": "alpacca"}, {"loss_on": "prompt"}, {"overlong": "wrap"}]
)
def test_unknown_option_value_is_refused_with_the_permitted_ones(option):
    ((name, value),) = option.items()
    with pytest.raises(DataError, match=f"a.jsonl: {name} should be one of '.*, found '{value}'"):
        Source("a.jsonl", **option)
