"""The bytes that attention takes in rows of several sequences, beyond those in rows of one.

cuDNN's packed layout treats every sequence that a row may hold as a row of its own, even if the
sequence is absent, and reserves the memory of a whole row for it.
"""

from typing import NamedTuple


class PackedBytes(NamedTuple):
    """Additional bytes of one layer's attention in rows that may hold several sequences.

    Attributes:
      kept: bytes per token that the layer keeps from the forward to the backward pass: the output
        of attention as cuDNN wrote it, padding included.
      kept_sequence: bytes kept per token and per sequence that a row may hold: the statistics of
        the softmax.
      working_sequence: bytes per token and per sequence that a row may hold, needed during the
        layer's backward pass: the gradient of q in float32 and, where several query heads share
        keys and values, the gradients of keys and values for every query head.
    """

    kept: float
    kept_sequence: float
    working_sequence: float

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> "PackedBytes":
        """Returns the bytes for the attention of a backbone.

        Args:
          heads: number of query heads.
          kv_heads: number of key and value heads, which the query heads share.
          head_dim: width of a head.
          itemsize: bytes of one value, 2 in bfloat16.
        """
        width = heads * head_dim
        of_each_head = 2 * itemsize * width if kv_heads < heads else 0
        return cls(itemsize * width, 4 * heads, 4 * width + of_each_head)

    def kept_by(self, tokens: int, max_sequences: int) -> float:
        """Returns the additional bytes that one layer keeps for its backward pass.

        Args:
          tokens: tokens of the microbatch.
          max_sequences: the most sequences that a row may hold; 1 gives 0 bytes.
        """
        of_token = self.kept + max_sequences * self.kept_sequence
        return tokens * of_token if max_sequences > 1 else 0.0

    def needed_by(self, tokens: int, max_sequences: int) -> float:
        """Returns the additional bytes that the layer's backward pass needs while it runs.
        Arguments as in `kept_by`."""
        return tokens * max_sequences * self.working_sequence if max_sequences > 1 else 0.0
