"""Lays the samples of tasks out in microbatches of one shape.

`pack_round` takes the stream lengths of each task's global batch and a shape class, and gives every
sample a slot, a row and an offset in a microbatch. Every chunk belongs to one task, and the content
of a task's chunks does not depend on the other tasks. `choose_shape` finds the shape class in which
given rounds take the least time.
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
