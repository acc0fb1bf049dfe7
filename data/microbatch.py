"""The arrays that one forward and backward pass reads, and the function that fills them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from .stored_samples import Sample, target_tokens


class Microbatch(NamedTuple):
    """The input arrays of one forward and backward pass, with samples of one or more tasks.

    It has `rows` rows of `row_len` tokens. A row may hold several samples one after another;
    attention stays within a sample. All rows in order form a stream of N = rows · row_len tokens,
    divided into *chunks* of equal length, each of which belongs to one task.

    Attributes:
      tokens: int32, the tokens that the model reads; 0 on padding; -1 - i at virtual token i of a
        sample, from 0.
      targets: int32, the token to predict at each position; 0 on padding.
      loss_weight: float32, the weight of each position's loss: 1 / n where the target counts in the
        loss, for n such targets in the task's whole global batch (the samples of one optimizer
        update); 0 elsewhere.
      positions: int32, position in the sample, from 0; 0 on padding.
      segment_ids: int32, number of the sample within its row, from 0; -1 on padding.
      sample_id: uint32, `Sample.sample_id` of each token's sample; 0 on padding. Dropout masks
        depend on it.
      chunk_slot: int32, the slot of each chunk's task, which is the index of the task's adapter in
        the stacked adapters of all tasks; -1 for a chunk without tokens.
    """

    tokens: Int[Array, "rows row_len"]
    targets: Int[Array, "rows row_len"]
    loss_weight: Float[Array, "rows row_len"]
    positions: Int[Array, "rows row_len"]
    segment_ids: Int[Array, "rows row_len"]
    sample_id: UInt32[Array, "rows row_len"]
    chunk_slot: Int[Array, " chunks"]


def fill_microbatch(
    placements: Iterable[tuple[int, int, int, int]],
    batches: Mapping[int, Sequence[Sample]],
    *,
    rows: int,
    row_len: int,
    chunk_len: int,
) -> Microbatch:
    """Copies the samples of one microbatch to their positions in NumPy arrays and pads the rest.

    A sample of n tokens takes n - 1 positions: the model reads all but its last token, and predicts
    all but its first one. The positions of its virtual tokens come before them.

    Args:
      placements: for every sample of this microbatch, a tuple (slot, sample, row, offset), as in
        `planner.packing.Placement`: the slot of the sample's task, the index of the sample in the
        task's global batch, the row, and the position in the row of the sample's first token. The
        samples of a row come in ascending order of their offsets. Samples of two slots must not
        share a chunk, and samples must not overlap or exceed their row; this is not checked.
      batches: by slot, the whole global batch of the task, even if other microbatches hold a part
        of it. The loss is divided by the number of target tokens in the whole global batch.
      chunk_len: tokens of a chunk; it divides rows · row_len. A chunk covers a part of a row or
        several whole rows.
    """
    shape = (rows, row_len)
    tokens, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    loss_weight = np.zeros(shape, np.float32)
    segment_ids = np.full(shape, -1, np.int32)
    sample_id = np.zeros(shape, np.uint32)
    chunk_slot = np.full(rows * row_len // chunk_len, -1, np.int32)
    weight = {slot: 1 / target_tokens(batch) for slot, batch in batches.items()}
    sequences = [0] * rows

    for slot, index, row, offset in placements:
        sample = batches[slot][index]
        span = slice(offset, offset + sample.stream_length)
        virtual = slice(offset, offset + sample.virtual_tokens)
        tokens[row, virtual] = -1 - np.arange(sample.virtual_tokens)
        text = slice(virtual.stop, span.stop)
        tokens[row, text] = sample.input_ids[:-1]
        targets[row, text] = sample.input_ids[1:]
        loss_weight[row, text] = np.where(sample.target_mask[1:], weight[slot], 0)
        positions[row, span] = np.arange(sample.stream_length)
        segment_ids[row, span] = sequences[row]
        sample_id[row, span] = sample.sample_id
        start, stop = row * row_len + span.start, row * row_len + span.stop
        chunk_slot[start // chunk_len : -(-stop // chunk_len)] = slot
        sequences[row] += 1
    return Microbatch(tokens, targets, loss_weight, positions, segment_ids, sample_id, chunk_slot)
