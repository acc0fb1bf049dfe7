"""A tokenized training sample, the unit that batches and packing move around."""

from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """One tokenized record.

    The model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so a sample of n tokens occupies
    n - 1 positions of the token stream.

    Attributes:
      input_ids: int32 [n], n >= 2.
      target_mask: bool [n], True where the token is to be predicted. `target_mask[0]` is False:
        nothing precedes the first token.
      sample_id: index of the record in its source, below 2**32. Identifies the sample to dropout.
    """

    input_ids: np.ndarray
    target_mask: np.ndarray
    sample_id: int

    @property
    def stream_length(self) -> int:
        """Tokens that the model computes for this sample, n - 1."""
        return len(self.input_ids) - 1

    @property
    def target_tokens(self) -> int:
        """Tokens that count in the loss."""
        return int(np.count_nonzero(self.target_mask))
