"""A part of a source's records that is held out, and the others."""

import hashlib
from typing import NamedTuple


class Part(NamedTuple):
    """Those records of a source that are held out, or those that are not.

    Whether a record is held out depends on its index, the fraction and the seed only. The records
    that a smaller fraction holds out are among those of a larger one.

    Attributes:
      fraction: the fraction of the records that is held out, on average.
      seed: seed of the choice.
      held_out: True for the records that are held out.
    """

    fraction: float
    seed: int
    held_out: bool

    def has(self, index: int) -> bool:
        """Whether a record belongs to the part.

        Args:
          index: number of the record in its source, from 0.
        """
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest) < self.fraction * 2**64) == self.held_out
