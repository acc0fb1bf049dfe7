"""Global batches depend on (seed, k) alone, and every epoch holds each sample exactly once."""

from itertools import islice

import numpy as np
import pytest

from jaxmux.data import DataError, GlobalBatches, Sample


def samples(count: int) -> list[Sample]:
    return [
        Sample(np.arange(i % 5 + 2, dtype=np.int32), np.arange(i % 5 + 2) > 0, i)
        for i in range(count)
    ]


def ids(batch: list[Sample]) -> list[int]:
    return [sample.sample_id for sample in batch]


def epoch_order(batches: GlobalBatches, epoch: int) -> list[int]:
    first = epoch * batches.batches_per_epoch
    return [i for k in range(batches.batches_per_epoch) for i in ids(batches[first + k])]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 23])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 100])
def test_every_epoch_covers_every_sample_once(count, batch_size):
    batches = GlobalBatches(samples(count), batch_size, seed=3)
    for epoch in range(4):
        assert sorted(epoch_order(batches, epoch)) == list(range(count))


def test_a_batch_that_is_asked_for_again_is_not_drawn_again():
    batches = GlobalBatches(samples(23), batch_size=4, seed=3)
    first = [ids(batches[k]) for k in range(8)]
    assert [ids(batches[k]) for k in range(8)] == first
    assert batches._groups.cache_info().misses == 8


@pytest.mark.parametrize("count", [7, 8, 23])
def test_only_the_last_batch_of_an_epoch_is_short(count):
    batches = GlobalBatches(samples(count), batch_size=4, seed=3, epochs=3)
    sizes = [len(batch) for batch in batches]
    full, rest = divmod(count, 4)
    assert sizes == ([4] * full + [rest] * (rest > 0)) * 3
    assert len(batches) == 3 * batches.batches_per_epoch == len(sizes)


def test_batch_larger_than_the_data_is_one_short_batch_an_epoch():
    batches = GlobalBatches(samples(3), batch_size=8, seed=0, epochs=2)
    assert [sorted(ids(batch)) for batch in batches] == [[0, 1, 2]] * 2


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = [
        tuple(epoch_order(GlobalBatches(samples(23), 4, seed), epoch))
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(23)) not in orders


def test_batch_depends_on_seed_and_index_alone():
    one = GlobalBatches(samples(23), 4, seed=5, epochs=4)
    other = GlobalBatches(samples(23), 4, seed=5)
    backwards = {k: ids(other[k]) for k in reversed(range(len(one)))}
    assert [ids(batch) for batch in one] == [backwards[k] for k in range(len(one))]


def test_without_shuffle_the_order_is_the_source_order():
    batches = GlobalBatches(samples(10), 4, seed=5, shuffle=False)
    assert epoch_order(batches, 0) == epoch_order(batches, 6) == list(range(10))


@pytest.mark.long
def test_endless_batches_go_on():
    batches = GlobalBatches(samples(3), 2, seed=1)
    assert len(list(islice(batches, 100))) == 100
    assert sorted(epoch_order(batches, 10**9)) == [0, 1, 2]


def test_samples_come_back_untouched():
    given = samples(3)
    for sample in GlobalBatches(given, 2, seed=0)[0]:
        assert sample is given[sample.sample_id]


def test_index_past_the_last_batch_is_an_index_error():
    batches = GlobalBatches(samples(5), 2, seed=0, epochs=1)
    for k in (3, -1):
        with pytest.raises(IndexError, match=f"global batch {k} of 3"):
            batches[k]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"samples": []}, "at least one sample"),
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"seed": -1}, "seed must not be negative"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_named(change, problem):
    arguments = {"samples": samples(3), "batch_size": 2, "seed": 0} | change
    with pytest.raises(DataError, match=problem):
        GlobalBatches(**arguments)
