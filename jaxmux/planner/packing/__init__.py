"""Lays the samples of tasks out in microbatches of one shape.

In go the stream lengths of each task's global batch and a shape class. Out come microbatches: for
every sample its slot, row and offset, so that every chunk belongs to one task and a task's chunks
are the same in any company. `choose_shape` finds the shape class in which given rounds cost least.
"""

from .first_fit import pack_first_fit
from .microbatches import PackedRound, Placement, RoundLengths, pack_round, pack_rounds
from .sampled_rounds import sample_rounds
from .shape_choice import PricedShape, ShapeRequest, choose_shape, plain_shape
from .shape_class import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class

__all__ = [
    "MIN_CHUNK_LEN",
    "PackedRound",
    "Placement",
    "PricedShape",
    "RoundLengths",
    "ShapeClass",
    "ShapeRequest",
    "choose_shape",
    "pack_first_fit",
    "pack_round",
    "pack_rounds",
    "plain_shape",
    "sample_rounds",
    "smallest_shape_class",
]
