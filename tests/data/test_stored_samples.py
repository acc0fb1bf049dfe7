"""Samples come back from the temporary file as they were stored."""

import gc
import os

import numpy as np
import pytest

from jaxmux.data import DataError, Sample, StoredSamples, stored, stored_samples
from jaxmux.data.stored_samples import joined, stream_lengths, target_tokens


def make(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        length = int(rng.integers(2, 40))
        mask = rng.random(length) < 0.5
        mask[0] = False
        ids = rng.integers(0, 2**31 - 1, length, np.int32)
        found.append(Sample(ids, mask, 2**32 - 1 - number))
    return found


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture(params=[8, 2**20], ids=["file", "memory"])
def found(request, monkeypatch) -> StoredSamples:
    monkeypatch.setattr(stored_samples, "_TOKENS_IN_MEMORY", request.param)
    return stored(make(50))


def same(one: Sample, other: Sample) -> bool:
    arrays = zip(one[:2], other[:2], strict=True)
    return one[2:] == other[2:] and all(np.array_equal(a, b) for a, b in arrays)


def test_samples_come_back_in_any_order(found):
    expected = make(50)
    assert found[0].input_ids.dtype == np.int32 and found[0].target_mask.dtype == bool
    for number in (49, 0, 7, 7, -1):
        assert same(found[number], expected[number])
    assert all(map(same, found[10:20:3], expected[10:20:3]))
    with pytest.raises(IndexError):
        found[50]


def test_lengths_and_targets_are_known_without_reading(found, monkeypatch):
    monkeypatch.setattr(stored_samples.TokenFile, "read", None)
    expected = make(50)
    assert stream_lengths(found).tolist() == stream_lengths(expected).tolist()
    assert target_tokens(found) == target_tokens(expected)
    longer = found.with_virtual_tokens(3)
    assert (longer.stream_lengths == found.stream_lengths + 3).all()


def test_parts_are_joined_and_their_numbers_shifted(found):
    both = joined([found.take(np.array([3, 3, 1])), found.with_ids_shifted(5)])
    assert len(both) == 53 and same(both[0], found[3]) and same(both[2], found[1])
    assert both[3].sample_id == 4 and both[-1].sample_id == found[-1].sample_id + 5


def test_the_file_has_no_name_and_ends_with_its_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_samples, "_TOKENS_IN_MEMORY", 8)
    monkeypatch.setattr(stored_samples, "temporary_folder", lambda: str(tmp_path))
    gc.collect()
    before = open_files()
    found = stored(make(50))
    part = found[3:5]
    assert not [*tmp_path.iterdir()] and open_files() == before + 1
    del found
    assert same(part[0], make(50)[3])
    del part
    assert open_files() == before


def test_a_folder_without_room_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_samples, "_TOKENS_IN_MEMORY", 8)
    missing = tmp_path / "missing"
    monkeypatch.setattr(stored_samples, "temporary_folder", lambda: str(missing))
    with pytest.raises(DataError, match=f"{missing}: the tokens of the data cannot be written"):
        stored(make(50))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_is_named_with_the_setting_that_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_samples, "_TOKENS_IN_MEMORY", 8)
    monkeypatch.setattr(stored_samples, "temporary_folder", lambda: str(tmp_path))
    full = open("/dev/full", "wb", buffering=0)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **options: full)
    with full, pytest.raises(DataError, match=f"{tmp_path}: .* No space left on device; .*TMPDIR"):
        stored(make(50))


def test_the_last_open_files_are_left_to_others(monkeypatch):
    monkeypatch.setattr(stored_samples, "_TOKENS_IN_MEMORY", 8)
    before = open_files()
    monkeypatch.setattr(stored_samples.resource, "getrlimit", lambda which: (4, 4))
    with pytest.raises(DataError, match=r"Too many open files \(the limit is 4\); .*ulimit -n"):
        stored(make(50))
    assert open_files() == before


def test_the_user_chooses_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert stored_samples.temporary_folder() == str(tmp_path)
