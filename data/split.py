"""Choices among records or samples that depend on their numbers and a seed only."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from .errors import DataError
from .samples import Sample
from .sources import Source


class Part(NamedTuple):
    """Those records of a source that are held out, or those that are not.

    Whether a record is held out depends on the other fields and its index only. The records that a
    smaller fraction holds out are among those of a larger one.

    Attributes:
      fraction: the fraction of the records that is held out, on average.
      seed: seed of the choice.
      held_out: True for the records that are held out.
      source: number of the source among those of a task.
    """

    fraction: float
    seed: int
    held_out: bool
    source: int = 0

    def has(self, index: int) -> bool:
        """Whether a record belongs to the part.

        Args:
          index: number of the record in its source, from 0.
        """
        return (_hash(self.seed, self.source, index) < self.fraction * 2**64) == self.held_out


def repeated(samples: Sequence[Sample], source: Source, seed: int) -> list[Sample]:
    """The samples of a source as often as it says.

    Args:
      samples: the samples of the source.
      source: the source; only its `path` and `repeat` are used.
      seed: seed of the choice of the samples that stand there once more often than others.

    Raises:
      DataError: no sample is left.
    """
    if source.repeat is None:
        return list(samples)
    whole = int(source.repeat)
    count = round((source.repeat - whole) * len(samples))
    order = sorted(range(len(samples)), key=lambda n: _hash(seed, "repeat", samples[n].sample_id))
    rest = [samples[n] for n in sorted(order[:count])]
    if not whole and not rest:
        raise DataError(
            f"{source.path}: repeat={source.repeat:g} of {len(samples)} samples is none"
        )
    return [*samples] * whole + rest


def _hash(*key: object) -> int:
    """An integer below 2**64."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
