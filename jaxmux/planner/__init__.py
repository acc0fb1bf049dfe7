"""Host-side planning: which tasks go together, which sample goes into which microbatch, row and
offset, and which microbatch when. Imports no device code.
"""

from .first_fit import pack_first_fit
from .microbatches import PackedBatch, Placement, pack_batch, pack_batches
from .shape_class import PlanningError, ShapeClass, choose_shape_class

__all__ = [
    "PackedBatch",
    "Placement",
    "PlanningError",
    "ShapeClass",
    "choose_shape_class",
    "pack_batch",
    "pack_batches",
    "pack_first_fit",
]
