"""Held-out records and the others are all records; which are which depends on number and seed."""

import numpy as np
import pytest

from jaxmux.data import DataError, Source, SplitPart, load_samples, read_records

PARTS = SplitPart(0.3, 7, False), SplitPart(0.3, 7, True)


@pytest.fixture
def path(write_jsonl) -> str:
    return write_jsonl(*({"text": f"Record {n} is about dogs."} for n in range(200)))


def ids(path, tokenizer, part, **options) -> set[int]:
    source = Source(path, **options)
    found = load_samples(source, tokenizer, max_length=64, part=part)
    assert found.read == len(found.samples) + found.skipped
    return {sample.sample_id for sample in found.samples}


def test_parts_are_disjoint_and_together_all_records(path, gpt):
    kept, held_out = (ids(path, gpt, part) for part in PARTS)
    assert kept | held_out == set(range(200)) and not kept & held_out
    # 200 records, each with a probability of 0.3: a standard deviation of 6.5.
    assert 35 < len(held_out) < 85


def test_a_part_holds_the_same_samples_as_the_whole(path, gpt):
    whole = load_samples(Source(path), gpt, max_length=64).samples
    for sample in load_samples(Source(path), gpt, max_length=64, part=PARTS[1]).samples:
        np.testing.assert_array_equal(sample.input_ids, whole[sample.sample_id].input_ids)


def test_a_part_depends_on_the_seed_and_not_on_other_options(path, gpt, write_jsonl):
    held_out = ids(path, gpt, PARTS[1])
    assert ids(path, gpt, PARTS[1], loss_on="all", max_samples=50) == {
        n for n in held_out if n < 50
    }
    assert ids(path, gpt, SplitPart(0.3, 8, True)) != held_out
    assert ids(path, gpt, SplitPart(0.1, 7, True)) < held_out
    lines = ["{" if n % 2 else {"text": "Another text."} for n in range(200)]
    damaged = write_jsonl(*lines, name="damaged.jsonl")
    found = ids(damaged, gpt, PARTS[1], on_bad_record="skip")
    assert found == {n for n in held_out if n % 2 == 0}


def test_the_fraction_is_that_of_many_records():
    for fraction in (0.01, 0.5, 0.9):
        count = sum(SplitPart(fraction, 0, True).has(n) for n in range(20_000))
        assert abs(count - 20_000 * fraction) < 5 * (20_000 * fraction * (1 - fraction)) ** 0.5


@pytest.mark.parametrize(
    ("part", "found"), [(SplitPart(1e-9, 0, True), "none"), (SplitPart(1 - 1e-9, 0, False), "all")]
)
def test_an_empty_part_is_refused_with_the_fraction(path, gpt, part, found):
    with pytest.raises(DataError, match=f"validation_fraction=.* holds out {found} of the records"):
        ids(path, gpt, part)


def test_the_form_and_the_columns_are_those_of_the_whole_source(gpt, write_jsonl):
    """Also if the records that show them belong to the other part."""
    held_out = [PARTS[1].has(n) for n in range(20)]
    rows = [{"instruction": "a", "output": "b"} for n in range(20)]
    rows[held_out.index(False)]["context"] = "c"
    rows[0] |= {"text": "d"}
    path = write_jsonl(*rows)
    assert len(ids(path, gpt, PARTS[1], columns={"input": "context"})) == sum(held_out)


def test_only_the_first_records_are_read(write_jsonl):
    path = write_jsonl({"text": "a"}, "{", {"text": "b"}, "not read")
    source = Source(path, max_samples=2, on_bad_record="skip")
    skipped = []
    assert [record.index for record in read_records(source, skipped.append)] == [0, 2]
    assert len(skipped) == 1
    assert [r.index for r in read_records(Source(path, max_samples=1))] == [0]
