"""The choice of held-out records, which depends on their numbers and a seed only."""

import hashlib
from typing import NamedTuple


class SplitPart(NamedTuple):
    """The held-out records of a source, or all others.

    Whether a record is held out depends only on its index and the other fields here. The records
    that a smaller fraction holds out are among those of a larger one.

    Attributes:
      fraction: average fraction of the records that is held out.
      held_out: True for the held-out records, False for the others.
      source: number of the source among those of a task.
    """

    fraction: float
    seed: int
    held_out: bool
    source: int = 0

    def has(self, index: int) -> bool:
        """Whether the record with this number in its source, from 0, belongs to the part."""
        return (stable_hash(self.seed, self.source, index) < self.fraction * 2**64) == self.held_out


def stable_hash(*key: object) -> int:
    """A hash below 2**64 that is the same in every process."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
