"""What attention needs in rows of several sequences beyond what it needs in rows of one.

cuDNN's packed layout takes every seat of a row, there for a sequence or not, as a row of its own,
and gives it room for a whole one.
"""

from typing import NamedTuple


class PackedBytes(NamedTuple):
    """Of one layer, in bytes.

    Attributes:
      kept: of a token, from forward to backward pass: the output as cuDNN made it, padding in it.
      kept_seat: the same of a token and seat: the softmax's statistics.
      working_seat: of a token and seat, while the layer goes backward: the gradient of q in
        float32 and, where heads share keys and values, these gradients of each head.
    """

    kept: float
    kept_seat: float
    working_seat: float

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> "PackedBytes":
        """Those of H heads that share the keys and values of `kv_heads`, of values of `itemsize`
        bytes."""
        width = heads * head_dim
        of_each_head = 2 * itemsize * width if kv_heads < heads else 0
        return cls(itemsize * width, 4 * heads, 4 * width + of_each_head)

    def kept_by(self, tokens: int, seats: int) -> float:
        """What a layer keeps of `tokens` tokens in rows with so many seats."""
        return tokens * (self.kept + seats * self.kept_seat) if seats > 1 else 0.0

    def needed_by(self, tokens: int, seats: int) -> float:
        """What its backward pass needs."""
        return tokens * seats * self.working_seat if seats > 1 else 0.0
