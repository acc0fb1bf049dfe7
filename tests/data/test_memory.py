"""Memory does not grow with the data. What is measured are objects of Python and NumPy."""

import csv
import gzip
import json
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxmux.data import Sample, Source, load_samples, read_records, stored
from jaxmux.data.stored_samples import stream_lengths, target_tokens

# Long words, so that a tokenizer of words is fast.
TEXT = " ".join(["x" * 400] * 25)
ROWS = 2_000
# Bytes of all texts, and most bytes that may be in memory at the same time.
WHOLE, LIMIT = ROWS * len(TEXT), 8 * 2**20


@pytest.fixture(autouse=True)
def memory():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def write_lines(path):
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        for number in range(ROWS):
            file.write(json.dumps({"text": f"{number} {TEXT}"}) + "\n")


def write_array(path):
    with path.open("w") as file:
        for number in range(ROWS):
            file.write(("," if number else "[") + json.dumps({"text": f"{number} {TEXT}"}))
        file.write("]")


def write_table(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([f"{n} {TEXT}"] for n in range(ROWS))])


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])) as writer:
        rows = [f"{number} {TEXT}" for number in range(ROWS)]
        writer.write_table(pyarrow.table({"text": rows}))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.jsonl.gz", write_lines),
        ("a.json", write_array),
        ("a.csv", write_table),
        ("a.parquet", write_parquet),
    ],
)
def test_readers_keep_a_few_records(tmp_path, name, write):
    write(tmp_path / name)
    tracemalloc.reset_peak()
    numbers = [
        int(record.fields["text"].partition(" ")[0])
        for record in read_records(Source(str(tmp_path / name)))
    ]
    assert numbers == [*range(ROWS)]
    assert WHOLE > 2 * LIMIT > 2 * tracemalloc.get_traced_memory()[1]


@pytest.mark.long
def test_texts_are_not_kept_while_they_are_tokenized(tmp_path):
    write_lines(tmp_path / "a.jsonl")
    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tracemalloc.reset_peak()
    found = load_samples(Source(str(tmp_path / "a.jsonl")), tokenizer, max_length=64)
    assert (found.samples.stream_lengths == 26).all() and len(found.samples) == ROWS
    assert WHOLE > 2 * LIMIT > 2 * tracemalloc.get_traced_memory()[1]


def test_tokens_are_not_kept():
    length, count = 200_000, 100

    def samples():
        for number in range(count):
            ids = np.arange(length, dtype=np.int32) + number
            yield Sample(ids, ids > number, number)

    tracemalloc.reset_peak()
    found = stored(samples())
    assert target_tokens(found) == stream_lengths(found).sum() == count * (length - 1)
    assert all(sample.input_ids[5] == 5 + sample.sample_id for sample in found)
    assert 4 * length * count > 4 * LIMIT > 2 * tracemalloc.get_traced_memory()[1]
