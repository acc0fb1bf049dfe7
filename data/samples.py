"""A tokenized training example, the unit that global batches and packing work with."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Sample(NamedTuple):
    """One tokenized training example.

    The model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so a sample of n tokens takes n -
    1 positions of a microbatch. Each virtual token before them takes a position too.

    Attributes:
      input_ids: int32, n at least 2.
      target_mask: True for the tokens that count in the loss; False for the first token, because no
        token precedes it.
      sample_id: index of the record in its source, from 0, below 2**32. Dropout masks depend on it.
      virtual_tokens: number of positions before the tokens that a trained prompt fills. Predictions
        at these positions do not count in the loss.
    """

    input_ids: Int[np.ndarray, " n"]
    target_mask: Bool[np.ndarray, " n"]
    sample_id: int
    virtual_tokens: int = 0

    @property
    def stream_length(self) -> int:
        """Number of positions in a row that this sample takes: virtual tokens and `read_tokens`."""
        return self.virtual_tokens + self.read_tokens

    @property
    def read_tokens(self) -> int:
        """Number of tokens that the model reads: all but the last one."""
        return len(self.input_ids) - 1

    @property
    def target_tokens(self) -> int:
        """Number of tokens that count in the loss."""
        return int(np.count_nonzero(self.target_mask))
