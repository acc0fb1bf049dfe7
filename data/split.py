"""The records that are held out: a choice that depends on their numbers and a seed only."""

import hashlib
from typing import NamedTuple


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
        return (stable_hash(self.seed, self.source, index) < self.fraction * 2**64) == self.held_out


def stable_hash(*key: object) -> int:
    """An integer below 2**64 that is the same in every process.

    Args:
      key: what it depends on.
    """
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
