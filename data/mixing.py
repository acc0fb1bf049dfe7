"""The number of samples of each source in an epoch of a task."""

from collections.abc import Sequence

import numpy as np

from .errors import DataError
from .sources import Source, stable_hash
from .stored_samples import StoredSamples

# An epoch is a list of samples in memory, with 20 bytes for each.
_MOST_SAMPLES = 2**27
# A number of samples that is above every limit.
_ENDLESS = 2.0**40


def epoch_counts(sizes: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """The number of samples of each source in an epoch.

    With `Source.weight`, the source that has the most samples for its weight is used once in an
    epoch, and the samples of other sources are repeated in proportion to the weights.

    Args:
      sizes: number of samples of each source, at least 1.
      sources: only `path`, `repeat` and `weight` are used.

    Raises:
      DataError: an epoch has no sample of a source, or too many samples for memory.
    """
    if sources[0].weight is not None:
        weights = [source.weight for source in sources]
        per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        counts = [
            # Without this limit, weights of very different sizes would give infinity.
            max(size, round(min(weight * per_weight, _ENDLESS)))
            for size, weight in zip(sizes, weights, strict=True)
        ]
    else:
        counts = [_repeated(n, source) for n, source in zip(sizes, sources, strict=True)]
    if sum(counts) > _MOST_SAMPLES:
        source, count = max(zip(sources, counts, strict=True), key=lambda pair: pair[1])
        what = "repeat" if source.weight is None else "weight"
        raise DataError(
            f"{source.path}: with {what}={getattr(source, what):g} an epoch would have {count:,} "
            f"samples of this source; all sources together may have {_MOST_SAMPLES:,}"
        )
    return counts


def copies(samples: StoredSamples, count: int, seed: int) -> StoredSamples:
    """Repeats samples to `count` in all. Each occurs equally often, up to a difference of one;
    `seed` decides which samples occur once more than the others."""
    whole, rest = divmod(count, len(samples))
    every = np.arange(len(samples))
    if not rest:
        return samples if whole == 1 else samples.take(np.tile(every, whole))
    hashes = [stable_hash(seed, "repeat", sample_id) for sample_id in samples.sample_ids.tolist()]
    chosen = np.sort(np.argsort(np.array(hashes, np.uint64), kind="stable")[:rest])
    return samples.take(np.concatenate([np.tile(every, whole), chosen]))


def _repeated(size: int, source: Source) -> int:
    if source.repeat is None:
        return size
    whole = int(source.repeat)
    count = whole * size + round((source.repeat - whole) * size)
    if not count:
        raise DataError(f"{source.path}: repeat={source.repeat:g} of {size} samples is none")
    return count
