"""Random rounds, assertions that hold for every packing of one, and MuxTune's rule for the shape
class."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxmux.planner.packing import (
    MIN_CHUNK_LEN,
    PricedShape,
    RoundLengths,
    ShapeClass,
    ShapeRequest,
    plain_shape,
)
from jaxmux.planner.packing.shape_choice import Cost

SHAPES = [
    ShapeClass(rows=1, row_len=64, chunk_len=64, max_sequences=4),
    ShapeClass(rows=4, row_len=256, chunk_len=64, max_sequences=16),
    ShapeClass(rows=3, row_len=512, chunk_len=128, max_sequences=3),
    ShapeClass(rows=8, row_len=64, chunk_len=128, max_sequences=1),
    ShapeClass(rows=8, row_len=64, chunk_len=256, max_sequences=4),
    ShapeClass(rows=2, row_len=1024, chunk_len=64, max_sequences=1),
    ShapeClass(rows=2, row_len=1024, chunk_len=1024, max_sequences=64),
]


def random_batch(shape: ShapeClass, seed: int) -> dict[int, list[int]]:
    """By slot, the lengths of one to five tasks: some with short samples, some with long ones, some
    with both."""
    rng = np.random.default_rng(seed)
    longest = [int(rng.choice([8, 40, shape.row_len])) for _ in range(rng.integers(1, 6))]
    return {
        slot: rng.integers(1, min(most, shape.row_len) + 1, rng.integers(1, 30)).tolist()
        for slot, most in enumerate(longest)
    }


def assert_every_sample_is_placed_once(microbatches, lengths) -> None:
    placed = sorted((p.slot, p.sample) for placements in microbatches for p in placements)
    assert placed == [(slot, s) for slot in sorted(lengths) for s in range(len(lengths[slot]))]


def assert_capacity_is_kept(microbatches, lengths, shape: ShapeClass) -> None:
    """No token belongs to two samples, no chunk to two tasks, no row holds too many sequences, and
    placements are in the order of the rows."""
    for placements in microbatches:
        tokens = np.zeros((shape.rows, shape.row_len), int)
        owners, sequences = defaultdict(set), defaultdict(int)
        for slot, sample, row, offset in placements:
            end = offset + lengths[slot][sample]
            assert 0 <= row < shape.rows and 0 <= offset and end <= shape.row_len
            tokens[row, offset:end] += 1
            sequences[row] += 1
            first, last = row * shape.row_len + offset, row * shape.row_len + end - 1
            for chunk in range(first // shape.chunk_len, last // shape.chunk_len + 1):
                owners[chunk].add(slot)
        assert tokens.max() <= 1
        assert all(len(slots) == 1 for slots in owners.values())
        assert max(sequences.values()) <= shape.max_sequences
        assert [p[2:] for p in placements] == sorted(p[2:] for p in placements)


def chunks_of(microbatches, lengths, shape: ShapeClass) -> dict[int, list[tuple]]:
    """By slot, its tokens in the order of the stream, each as (offset in its chunk, sample, offset
    in the sample, whether a chunk begins there)."""
    tokens = defaultdict(list)
    for number, placements in enumerate(microbatches):
        for slot, sample, row, offset in placements:
            for part in range(lengths[slot][sample]):
                chunk, rest = divmod(row * shape.row_len + offset + part, shape.chunk_len)
                tokens[slot].append(((number, chunk), rest, sample, part))
    found = {}
    for slot, items in tokens.items():
        items.sort()
        chunks = [item[0] for item in items]
        borders = [a != b for a, b in zip([None, *chunks], chunks, strict=False)]
        found[slot] = [(*item[1:], border) for item, border in zip(items, borders, strict=True)]
    return found


def muxtune_shape(
    rounds: Sequence[RoundLengths], request: ShapeRequest, seconds: Cost
) -> PricedShape:
    """Returns the shape class of MuxTune's rule, with its cost (MuxTune 3.5).

    The rule takes the chunk length of `muxtune_chunk_len` and the shortest row that holds the
    longest sample. Arguments and errors are as in `choose_shape`.
    """
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    chunk_len = muxtune_chunk_len(lengths, request.least_chunk_len)
    return plain_shape(rounds, request._replace(chunk_len=chunk_len), seconds)


def muxtune_chunk_len(lengths: Sequence[int], least: int = MIN_CHUNK_LEN) -> int:
    """Returns the greatest power of two that divides all lengths, or `least` if that is greater
    (MuxTune 3.5)."""
    divisor = math.gcd(*lengths)
    return max(least, divisor & -divisor)
