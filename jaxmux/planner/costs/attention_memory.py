"""The memory of attention in rows of several sequences, beyond that in rows of one.

cuDNN's packed layout treats every sequence that a row has room for as a row of its own, whether the
sequence is there or not, and reserves memory for a whole row.
"""

from typing import NamedTuple


class PackedBytes(NamedTuple):
    """Bytes of one layer's attention.

    Attributes:
      kept: bytes per token kept from the forward to the backward pass: the output as cuDNN wrote
        it, with the padding inside.
      kept_sequence: bytes kept per token and sequence that the row has room for: the statistics of
        the softmax.
      working_sequence: bytes per token and sequence that the row has room for, needed while the
        layer goes backward: the gradient of q in float32 and, where heads share keys and values,
        the gradients of keys and values for every head.
    """

    kept: float
    kept_sequence: float
    working_sequence: float

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> "PackedBytes":
        """The bytes for H query heads that share `kv_heads` key and value heads.

        Args:
          itemsize: bytes of a value.
        """
        width = heads * head_dim
        of_each_head = 2 * itemsize * width if kv_heads < heads else 0
        return cls(itemsize * width, 4 * heads, 4 * width + of_each_head)

    def kept_by(self, tokens: int, max_sequences: int) -> float:
        """Bytes that one layer keeps for its backward pass, for `tokens` tokens in rows that hold
        at most `max_sequences` sequences; 0 for rows of one sequence."""
        if max_sequences == 1:
            return 0.0
        return tokens * (self.kept + max_sequences * self.kept_sequence)

    def needed_by(self, tokens: int, max_sequences: int) -> float:
        """Bytes that the layer's backward pass needs while it runs; arguments as of `kept_by`."""
        return tokens * max_sequences * self.working_sequence if max_sequences > 1 else 0.0
