"""Several devices: the parts of a backbone that each stage holds, and the programs that it runs."""

from .placed_backbone import (
    Part,
    PlacedBackbone,
    consecutive_parts,
    load_placed_backbone,
    place_backbone,
    random_placed_backbone,
)
from .stage_mesh import (
    OneDevice,
    StageMesh,
    compiles_only,
    in_threads,
    only_compiling,
    shapes_of,
    stage_meshes,
)
from .stage_programs import Passed, StageOptions, backward, forward, forward_into, log_probs

__all__ = [
    "OneDevice",
    "Part",
    "Passed",
    "PlacedBackbone",
    "StageMesh",
    "StageOptions",
    "backward",
    "compiles_only",
    "consecutive_parts",
    "forward",
    "forward_into",
    "in_threads",
    "load_placed_backbone",
    "log_probs",
    "only_compiling",
    "place_backbone",
    "random_placed_backbone",
    "shapes_of",
    "stage_meshes",
]
