"""How often an epoch of a task has the samples of each of its sources."""

from collections.abc import Sequence

import numpy as np

from .errors import DataError
from .sources import Source
from .split import stable_hash
from .stored_samples import StoredSamples

# An epoch is a list of numbers of samples in memory, with 20 bytes for each.
_MOST_SAMPLES = 2**27
# A number of samples of one source that is refused.
_ENDLESS = 2.0**40


def epoch_counts(sizes: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """The number of samples that an epoch has of each source.

    With `Source.weight`, the source that has the most samples for its weight stands in the epoch
    once, and the others as often as the weights say.

    Args:
      sizes: by source, its number of samples; at least 1.
      sources: the sources; only `path`, `repeat` and `weight` are used.

    Raises:
      DataError: an epoch has no sample of a source, or too many samples for memory.
    """
    if sources[0].weight is not None:
        weights = [source.weight for source in sources]
        per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        counts = [
            # Weights of very different sizes would give an infinite number.
            max(size, round(min(weight * per_weight, _ENDLESS)))
            for size, weight in zip(sizes, weights, strict=True)
        ]
    else:
        counts = [_repeated(n, source) for n, source in zip(sizes, sources, strict=True)]
    if sum(counts) > _MOST_SAMPLES:
        source, count = max(zip(sources, counts, strict=True), key=lambda own: own[1])
        what = "repeat" if source.weight is None else "weight"
        raise DataError(
            f"{source.path}: with {what}={getattr(source, what):g} an epoch would have {count:,} "
            f"samples of this source; all sources together may have {_MOST_SAMPLES:,}"
        )
    return counts


def copies(samples: StoredSamples, count: int, seed: int) -> StoredSamples:
    """Each sample equally often, as far as the number of samples permits.

    Args:
      samples: the samples of a source.
      count: number of samples of the result.
      seed: seed of the choice of the samples that stand there once more often than others.
    """
    whole, rest = divmod(count, len(samples))
    every = np.arange(len(samples))
    if not rest:
        return samples if whole == 1 else samples.take(np.tile(every, whole))
    hashes = [stable_hash(seed, "repeat", own) for own in samples.sample_ids.tolist()]
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
