"""The arrays that one pass over the backbone reads."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32


class Microbatch(NamedTuple):
    """N = rows · row_len tokens of one or more tasks, in chunks that each belong to one task.

    Attributes:
      tokens: int32 [rows, row_len], inputs.
      targets: int32 [rows, row_len], the token to predict at each position.
      loss_weight: float32 [rows, row_len], weight of predicting `targets`; it carries 1 / (target
        tokens of the task's global batch) and is 0 on prompts and padding.
      positions: int32 [rows, row_len], restarting at 0 in every sequence.
      segment_ids: int32 [rows, row_len], which sequence of the row a token belongs to, -1 for
        padding.
      sample_id: uint32 [rows, row_len], identity of the sample, for dropout.
      chunk_slot: int32 [N / chunk_len], owner slot of each chunk, -1 for an empty one.
    """

    tokens: Int[Array, "rows row_len"]
    targets: Int[Array, "rows row_len"]
    loss_weight: Float[Array, "rows row_len"]
    positions: Int[Array, "rows row_len"]
    segment_ids: Int[Array, "rows row_len"]
    sample_id: UInt32[Array, "rows row_len"]
    chunk_slot: Int[Array, "C"]
