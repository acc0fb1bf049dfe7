"""Lays the samples of tasks out in microbatches of one shape.

`pack_round` gives every sample of a round a row and an offset in a microbatch. `choose_shape` finds
the shape class in which given rounds are predicted to take the least time. The *stream length* of a
sample is its number of tokens without the last one, because the model predicts the next token.

*Isolation* means that the contents and the order of a task's chunks depend on that task's samples
alone. Other tasks only change the rows in which the chunks lie.
"""

from .microbatches import Members, PackedRound, Placement, RoundLengths, pack_round, pack_rounds
from .rows import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from .shape_choice import (
    Batches,
    PartOfBatches,
    PricedShape,
    ShapeRequest,
    at_most,
    choose_shape,
    longest_that_fits,
    plain_shape,
    require_longest_rows,
    sample_rounds,
    sampled_part,
    with_fewer_rows,
)

__all__ = [
    "Batches",
    "MIN_CHUNK_LEN",
    "Members",
    "PackedRound",
    "PartOfBatches",
    "Placement",
    "PricedShape",
    "RoundLengths",
    "ShapeClass",
    "ShapeRequest",
    "at_most",
    "choose_shape",
    "longest_that_fits",
    "pack_round",
    "pack_rounds",
    "plain_shape",
    "require_longest_rows",
    "sample_rounds",
    "sampled_part",
    "smallest_shape_class",
    "with_fewer_rows",
]
