"""Host-side planning: which sample goes into which microbatch, row and offset. Imports no device
code.
"""

from .packing import Placement, pack_round
from .shape_class import PlanningError, ShapeClass, choose_shape_class

__all__ = ["Placement", "PlanningError", "ShapeClass", "choose_shape_class", "pack_round"]
