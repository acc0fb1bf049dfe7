"""An epoch has the samples of each source as often as `repeat` or `weight` say."""

from collections import Counter

import numpy as np
import pytest

from jaxmux.data import DataError, Sample, Source, stored
from jaxmux.data.batches import copies, epoch_counts


def counts(size, repeat, seed=0):
    samples = stored(Sample(np.zeros(2, np.int32), np.arange(2) > 0, n) for n in range(size))
    (count,) = epoch_counts([size], [Source("a.jsonl", repeat=repeat)])
    found = Counter(copies(samples, count, seed).sample_ids.tolist())
    return [found[n] for n in range(size)]


def test_samples_are_repeated_as_often_as_the_source_says():
    assert counts(10, None) == counts(10, 1) == [1] * 10
    assert counts(10, 3) == [3] * 10
    assert sorted(counts(10, 2.3)) == [2] * 7 + [3] * 3
    assert counts(10, 0.4) == counts(10, 0.4) != counts(10, 0.4, seed=1)
    assert sum(counts(10, 0.4)) == 4
    with pytest.raises(DataError, match="a.jsonl: repeat=0.01 of 10 samples is none"):
        counts(10, 0.01)


@pytest.mark.parametrize(
    ("sizes", "weights", "found"),
    [
        ([700, 300], [0.7, 0.3], [700, 300]),
        ([100, 300], [7, 3], [700, 300]),
        ([100, 9000], [70, 30], [21000, 9000]),
        ([10, 10, 5], [1, 2, 1], [10, 20, 10]),
    ],
)
def test_weights_are_shares_and_every_sample_occurs(sizes, weights, found):
    sources = [Source(f"{w}.jsonl", weight=w) for w in weights]
    assert epoch_counts(sizes, sources) == found


def test_an_epoch_that_fits_no_memory_is_refused():
    sources = [Source("a.jsonl", weight=1), Source("b.jsonl", weight=1e-7)]
    with pytest.raises(DataError, match="a.jsonl: with weight=1 an epoch would have 1,000,000,000"):
        epoch_counts([10, 100], sources)
    with pytest.raises(DataError, match="a.jsonl: with repeat=1e[+]08 an epoch would have 1,000,0"):
        epoch_counts([10], [Source("a.jsonl", repeat=1e8)])
    tiny = [Source("a.jsonl", weight=1), Source("b.jsonl", weight=5e-324)]
    with pytest.raises(DataError, match="a.jsonl: with weight=1 an epoch would have"):
        epoch_counts([10, 100], tiny)


def test_repeat_and_weight_exclude_each_other():
    with pytest.raises(DataError, match="a.jsonl: give repeat or weight, not both"):
        Source("a.jsonl", repeat=2, weight=1)
