"""Fills the arrays of a microbatch from placed samples."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .microbatch import Microbatch
from .samples import Sample


def fill_microbatch(
    placements: Iterable[tuple[int, int, int, int]],
    batches: Mapping[int, Sequence[Sample]],
    *,
    rows: int,
    row_len: int,
    chunk_len: int,
) -> Microbatch:
    """Packs samples into fixed-shape arrays.

    Args:
      placements: (slot, index in the slot's global batch, row, offset) of every sample of this
        microbatch; the sequences of a row in ascending order of offset.
      batches: by slot, the *whole* global batch of the task: its target tokens normalise the loss.
      rows, row_len, chunk_len: the shape class.

    Returns:
      NumPy arrays as `Microbatch` describes them.
    """
    shape = (rows, row_len)
    tokens, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    loss_weight = np.zeros(shape, np.float32)
    segment_ids = np.full(shape, -1, np.int32)
    sample_id = np.zeros(shape, np.uint32)
    chunk_slot = np.full(rows * row_len // chunk_len, -1, np.int32)
    weight = {slot: 1 / sum(s.target_tokens for s in batch) for slot, batch in batches.items()}
    sequences = [0] * rows

    for slot, index, row, offset in placements:
        sample = batches[slot][index]
        at = slice(offset, offset + sample.stream_length)
        tokens[row, at] = sample.input_ids[:-1]
        targets[row, at] = sample.input_ids[1:]
        loss_weight[row, at] = np.where(sample.target_mask[1:], weight[slot], 0)
        positions[row, at] = np.arange(sample.stream_length)
        segment_ids[row, at] = sequences[row]
        sample_id[row, at] = sample.sample_id
        start, stop = row * row_len + at.start, row * row_len + at.stop
        chunk_slot[start // chunk_len : -(-stop // chunk_len)] = slot
        sequences[row] += 1
    return Microbatch(tokens, targets, loss_weight, positions, segment_ids, sample_id, chunk_slot)
